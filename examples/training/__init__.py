"""How the bundled pair and the bundled draft heads were trained."""
