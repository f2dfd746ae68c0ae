"""What users hold: results, what can be read off them, and their files."""
