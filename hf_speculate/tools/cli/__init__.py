"""The subcommands of `hf-speculate`."""
