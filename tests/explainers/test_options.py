"""The options of `attribute`: one record, with the names and defaults of the public signature."""

import inspect
from dataclasses import FrozenInstanceError, fields

import pytest
import torch

from smoothhess import SmoothHess
from smoothhess.explainers.options import Options


def test_fields_and_signature_agree():
    parameters = inspect.signature(SmoothHess.attribute).parameters.values()
    keywords = {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}
    assert {f.name: f.default for f in fields(Options)} == keywords
    assert Options().arguments() == keywords


def test_options_are_frozen():
    with pytest.raises(FrozenInstanceError):
        Options().tol = 0.2


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"design": "grid"}, ValueError, "design"),
        ({"control": "line"}, ValueError, 'control must be "auto", "kink" or None'),
        ({"n_calls": 33}, ValueError, "n_calls must be even"),
        ({"max_calls": 1.5}, TypeError, "max_calls must be an integer"),
        ({"tol": 0.0}, ValueError, "tol must lie between 0 and 1"),
        ({"tol": 10}, ValueError, "tol must lie between 0 and 1, it is a relative error, got 10"),
        ({"tol": float("nan")}, ValueError, "tol must lie between 0 and 1"),
        ({"tau_probes": 4}, ValueError, "tau_probes must be at least 8"),
        ({"internal_batch_size": 0}, ValueError, "internal_batch_size must be"),
    ],
)
def test_wrong_options_raise_before_the_model_is_known(options, error, words):
    with pytest.raises(error, match=words):
        Options(**options)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"tol": 0.01}, "tol=0.01 is ignored"),
        ({"tol": 10, "max_calls": 4000}, "tol=10 and max_calls=4000 are ignored"),
        ({"max_calls": 4000}, "so max_calls=4000 is ignored"),
    ],
)
def test_tol_and_max_calls_are_ignored_with_a_warning_where_n_calls_is_given(options, words):
    with pytest.warns(UserWarning, match=words):
        assert Options(n_calls=64, **options).rows(3) == 32


def test_the_warning_about_ignored_options_is_that_of_the_call():
    with pytest.warns(UserWarning, match="n_calls=8 is given") as found:
        SmoothHess(lambda x: x.prod(1)).attribute(torch.ones(1, 2), sigma=0.1, n_calls=8, tol=0.01)
    assert found[0].filename == __file__


def test_the_default_of_max_calls_depends_on_the_dimensions():
    assert [Options().rows(k) for k in (10, 1024, 1025, 3073)] == [10_000, 10_000, 1024, 1536]
    assert Options(feature_mask=torch.zeros(3, dtype=torch.long)).rows(3073) == 10_000
    assert Options(max_calls=500).rows(3073) == 250
