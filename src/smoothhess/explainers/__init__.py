"""The explainers: SmoothHess, NeuronSmoothHess, smooth_hvp and diagnose.

This package validates the arguments, samples the model and returns a result. The result classes are in
`smoothhess.result`, the formulas of the estimate in `smoothhess.estimate`.
"""
