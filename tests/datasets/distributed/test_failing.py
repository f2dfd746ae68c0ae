"""One rank fails: all of them do, at once, in its words; and they can go on with something else afterwards."""

import json

import pytest

from smoothhess.datasets import Store
from tests.datasets.distributed.launch import by_hand

SOON = 15  # seconds; on a busy machine


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    """The folder of two ranks that went through everything, without anyone to look after them."""
    folder = tmp_path_factory.mktemp("failing")
    (code, output), (killed, _) = by_hand("failing_worker.py", 2, folder)
    assert code == 3, output
    assert killed == -9
    return folder


@pytest.fixture(scope="module")
def told(ended):
    """Kind and words of each rank's error, and after how long, by scene."""
    return [json.loads((ended / f"told {rank}.json").read_text()) for rank in (0, 1)]


@pytest.mark.parametrize(
    ("scene", "rank", "words"),
    [
        ("stumbles while sampling", 1, "the last rank stumbled"),
        ("stumbles at once", 1, "the last rank stumbled"),
        ("the leader stumbles", 0, "the model's output is NaN or infinite"),
        ("other weights", 1, "the models differ. Load the same weights on every rank"),
        ("other folders", 1, "is not the folder that rank 0 writes to"),
        ("records", 1, "the last rank stumbled"),
    ],
)
def test_the_rank_that_fails_says_why_and_the_other_says_who(told, scene, rank, words):
    kind, text, seconds = told[rank][scene]
    assert kind == "ValueError"
    assert words in text
    kind, text, _ = told[1 - rank][scene]
    assert kind == "RankError"
    assert text.startswith(f"rank {rank} failed with ValueError: ")
    assert words in text
    assert seconds < SOON


@pytest.mark.parametrize(
    ("scene", "words"),
    [
        ("all are asked for nonsense", "n_calls must be even"),
        ("one is asked for more", "rank 0 has n_calls = 64, not 66 as rank 1 has"),
        ("other inputs", "rank 0 has inputs = 'float64 [3, 12]"),
        ("other seeds", "rank 0 has seed = 0, not 1 as rank 1 has"),
        ("records of other weights", "rank 0 has model = 'Sequential "),
        ("fewer records", "rank 0 has records = 40, not 37"),
    ],
)
def test_what_is_asked_wrongly_is_refused_everywhere(told, scene, words):
    for rank in (0, 1):
        assert told[rank][scene][0] == "ValueError"
        assert words in told[rank][scene][1]


def test_other_records_are_refused_everywhere(told):
    """By the rank that reads a record of another rank first, or by both when they compare their data at the end."""
    kinds, words = zip(*(told[rank]["other records"][:2] for rank in (0, 1)), strict=True)
    assert "ValueError" in kinds
    assert set(kinds) <= {"ValueError", "RankError"}
    refusal = words[kinds.index("ValueError")]
    assert any(text in refusal for text in ("rank 0 has data = '", "has read other records", "is not the one"))


def test_a_closed_form_that_one_rank_cannot_make_names_that_rank(told):
    words = "control='kink' cannot be used: rank 1: freeze wants the 2 recorded calls"
    assert told[0]["one cannot be frozen"][0] == "ValueError"
    assert told[1]["one cannot be frozen"][0] == "RankError"
    assert all(words in told[rank]["one cannot be frozen"][1] for rank in (0, 1))


def test_an_interrupted_rank_is_told_of(told):
    assert told[1]["interrupted"][0] == "KeyboardInterrupt"
    assert told[0]["interrupted"][:2] == ["RankError", "rank 1 failed with KeyboardInterrupt"]


def test_the_ranks_can_go_on_after_a_failure(told):
    assert all(told[rank][scene][0] == "" for rank in (0, 1) for scene in ("before", "after"))


def test_a_killed_rank_is_missed_at_once(told):
    kind, text, seconds = told[0]["dies"]
    assert kind == "RankError"
    assert text.startswith("rank 1 does not answer: it was killed")
    assert seconds < SOON
    assert "dies" not in told[1]


def test_records_of_two_models_are_never_mixed(ended):
    """The weights are compared before the first record."""
    assert not (ended / "other weights" / "store.json").exists()


def test_what_was_stored_before_a_failure_stays(ended):
    """And the other rank stopped in the middle of its share."""
    store = Store(ended / "records")
    assert 1 <= len(store) < 20
    assert all(record.hessian.isfinite().all() for record in store)
