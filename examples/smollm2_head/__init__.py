"""A draft head for SmolLM2-135M-Instruct: its weights, and the drafter that runs them."""
