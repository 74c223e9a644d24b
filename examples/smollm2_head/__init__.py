"""Draft head for SmolLM2-135M-Instruct: its weights and its drafter."""
