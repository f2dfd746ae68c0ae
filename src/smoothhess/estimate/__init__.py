"""Estimation of the Hessian and of its Monte-Carlo error from sampled rows.

Modules of this package see tensors of draws and gradients only. Models are called in `smoothhess.explainers`; the
classes that users read results from are in `smoothhess.result`.
"""
