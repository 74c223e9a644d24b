"""Write repositories for the Hugging Face Hub."""
