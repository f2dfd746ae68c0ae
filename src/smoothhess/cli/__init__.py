"""The command line: smoothhess explain, smoothhess demo."""
