"""Drop-in replacements with the signatures of other libraries' verification functions."""
