"""Drop-in replacements for the verification functions of other libraries."""
