"""The command-line interface: `smoothhess explain` and `smoothhess demo`."""
