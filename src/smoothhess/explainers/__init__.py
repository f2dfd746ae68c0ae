"""What users call: SmoothHess and its kin, from the options of a call to a result."""
