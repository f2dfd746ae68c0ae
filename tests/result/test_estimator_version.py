"""Numbers of two versions of the estimator are never mixed; the older ones can still be read.

The files in tests/data were written before results carried a version.
"""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from smoothhess import Interactions, SmoothHess, Store, explain_dataset
from smoothhess.estimate.statistics import ESTIMATOR_VERSION
from smoothhess.evaluate.global_summary import GlobalInteractions

DATA = Path(__file__).parents[1] / "data"
RECORDS = torch.tensor([[0.5, -0.25, 1.0], [1.0, 2.0, 0.5]])
OPTIONS = {"sigma": 0.5, "n_calls": 12, "control": None}


def product(x):
    return x.prod(1)


@pytest.fixture
def old():
    return Interactions.load(DATA / "estimator-1.safetensors")


@pytest.fixture
def new():
    return SmoothHess(product).attribute(RECORDS[:1], seed=1, **OPTIONS)


def test_an_old_file_is_read(old):
    assert (old.estimator_version, old.shape, int(old.n_calls)) == (1, (1, 3, 3), 12)
    assert old.stein_z.shape == (1, 2)
    assert torch.isfinite(old.stein_z).all()
    torch.testing.assert_close(old.output, RECORDS[:1].prod(1))


def test_a_file_keeps_its_version(old, new, tmp_path):
    for result in (old, new):
        result.save(tmp_path / "result.safetensors")
        assert Interactions.load(tmp_path / "result.safetensors").estimator_version == result.estimator_version
    assert new.estimator_version == ESTIMATOR_VERSION == new[0].estimator_version


def test_results_of_two_versions_are_neither_merged_nor_concatenated(old, new):
    for mix in (lambda: old.merge(new), lambda: new.merge(old), lambda: Interactions.cat([new, old])):
        with pytest.raises(ValueError, match="versions . and . of the estimator.*Rerun the older one"):
            mix()
    assert len(Interactions.cat([old, old])) == 2


def test_an_old_result_gets_no_further_calls(old):
    with pytest.raises(ValueError, match="made by version 1 of the estimator.*Rerun attribute"):
        SmoothHess(product).more(old, 12)


def test_an_old_store_is_read_but_not_resumed(tmp_path):
    folder = tmp_path / "store"
    shutil.copytree(DATA / "estimator-1-store", folder)
    store = Store(folder)
    assert (len(store), store.estimator_version, len(store.summary())) == (2, 1, 2)
    assert store[1].top_pairs(1)
    with pytest.raises(ValueError, match="made by version 1 of the estimator.*Begin another folder"):
        explain_dataset(SmoothHess(product), RECORDS, folder, keep="pairs", **OPTIONS)
    made = explain_dataset(SmoothHess(product), RECORDS, tmp_path / "other", keep="pairs", **OPTIONS)
    assert made.estimator_version == ESTIMATOR_VERSION
    again = explain_dataset(SmoothHess(product), RECORDS, tmp_path / "other", keep="pairs", **OPTIONS)
    assert len(again) == 2
    with pytest.raises(ValueError, match="versions 1 and . of the estimator"):
        store.summary().merge(replace(made.summary(), segments=((9, 0, 2),)))


def test_global_interactions_keep_their_version(tmp_path):
    found = Store(DATA / "estimator-1-store").summary()
    found.save(tmp_path / "global.safetensors")
    assert GlobalInteractions.load(tmp_path / "global.safetensors").estimator_version == 1


class TestFilesOfTheOldTree:
    """Written before the modules were rearranged: a sampled result, group sums, an exact one, a store, a summary."""

    @pytest.mark.parametrize(
        ("name", "kind", "d"), [("sampled", "Interactions", 4), ("groups", "Interactions", 2), ("exact", "Exact", 4)]
    )
    def test_results(self, name, kind, d):
        result = Interactions.load(DATA / f"{name}.safetensors")
        assert (type(result).__name__, result.shape) == (kind, (1, d, d))
        assert torch.isfinite(result.hessian).all()
        assert len(result.top_pairs(1)[0]) == 1

    def test_a_store_and_a_summary(self):
        store = Store(DATA / "store")
        assert (len(store), store.estimator_version) == (3, 2)
        assert store[2].top_pairs(1)
        assert len(GlobalInteractions.load(DATA / "global.safetensors")) == 6
