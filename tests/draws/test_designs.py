import numpy as np
import pytest
import torch

from smoothhess.draws.designs import (
    DESIGNS,
    EXACT,
    _mixed_rows,
    _orthonormal,
    find_design,
    pilot_rows,
    pilot_stack,
    tau_rows,
)


@pytest.mark.parametrize("name", sorted(DESIGNS))
@pytest.mark.parametrize("k", [1, 2, 5, 64])
class TestContract:
    """What every design owes."""

    def test_rows_do_not_depend_on_how_they_are_asked_for(self, name, k):
        design = DESIGNS[name]
        whole = design.rows(3, 0, 200, k)
        parts = [design.rows(3, a, b, k) for a, b in [(0, 1), (1, 64), (64, 130), (130, 200)]]
        # to rounding: Gram–Schmidt of more rows may round the first ones differently
        for name in ("z", "score", "weight"):
            joined = torch.cat([getattr(p, name) for p in parts])
            torch.testing.assert_close(getattr(whole, name), joined, rtol=0, atol=1e-12)

    def test_float64_on_the_cpu_from_the_seed_alone(self, name, k):
        torch.manual_seed(0)
        before = torch.get_rng_state()
        a, b = (DESIGNS[name].rows(7, 0, 10, k) for _ in range(2))
        assert torch.equal(a.z, b.z)
        assert a.z.dtype == torch.float64
        assert torch.equal(before, torch.get_rng_state())
        assert not torch.equal(a.z, DESIGNS[name].rows(8, 0, 10, k).z)

    def test_scores_and_weights_undo_the_law_of_the_points(self, name, k):
        """E[s zᵀ] = I, E[w] = 1, E[w |z|²] = k and E[w |z|⁴] = k(k + 2), by z-score over units."""
        design, units = DESIGNS[name], 200
        rows = design.rows(0, 0, units * design.replicate_rows(k), k)
        z, score = (t.reshape(units, -1, k) for t in (rows.z, rows.score))
        weight = rows.weight.reshape(units, -1)
        square = z.square().sum(-1)
        cases = {
            "identity": (score.mT @ z / z.shape[1], torch.eye(k).double()),
            "one": (weight.mean(1), 1.0),
            "square": ((weight * square).mean(1), float(k)),
            "fourth": ((weight * square**2).mean(1), float(k * (k + 2))),
        }
        for what, (estimate, truth) in cases.items():
            error, se = (estimate.mean(0) - truth).abs(), estimate.std(0) / units**0.5
            assert (error <= 6 * se + 1e-9).all(), what


def test_draws_are_numpys_normals():
    """The stream is documented, not accidental: block b of seed s is SeedSequence(s, spawn_key=(b,))."""
    expected = np.random.default_rng(np.random.SeedSequence(5, spawn_key=(1,))).standard_normal((3, 4))
    assert np.array_equal(find_design("antithetic").rows(5, 64, 67, 4).z.numpy(), expected)


@pytest.mark.parametrize("k", [1, 2, 4, 5, 64, 1025])
def test_one_orthogonal_block_resolves_the_identity(k):
    design = find_design("orthogonal")
    rows = design.rows(0, 0, design.block_rows(k), k)
    torch.testing.assert_close(rows.score.mT @ rows.z / len(rows), torch.eye(k).double(), rtol=0, atol=1e-10)


@pytest.mark.parametrize("k", [1, 2, 7, 8, 1030])
def test_mixed_rows_are_rounds_of_scipys_cosine_transform_with_signs_and_permutations(k):
    from scipy.fft import dct

    rng, expected = np.random.default_rng(np.random.SeedSequence(4, spawn_key=(2,))), np.eye(k)
    for _ in range(3):
        signs, order = rng.choice([-1.0, 1.0], k), rng.permutation(k)
        expected = (dct(expected, norm="ortho", axis=1) * signs)[:, order]
    np.testing.assert_allclose(_mixed_rows((4, 2), 0, k, k, EXACT), expected, atol=1e-12)


def test_mixed_directions_are_uniform_enough():
    """Moments of u_i² and u_i u_j over blocks as on the sphere, at the dimension where QR is given up."""
    k, blocks = 1025, 30
    rows = torch.cat([find_design("orthogonal").rows(s, 0, 40, k).z for s in range(blocks)])
    u = rows / rows.norm(dim=1, keepdim=True)
    fourth = (u**4).sum(1)
    assert abs(float(fourth.mean()) * (k + 2) / 3 - 1) < 0.02
    means = u.mean(0) * (len(u) * k) ** 0.5
    assert float(means.abs().max()) < 5


def test_sobol_has_a_largest_dimension():
    with pytest.raises(ValueError, match="supports up to 21201 dimensions, got 30000. Use design='orthogonal'"):
        find_design("sobol").rows(0, 0, 1, 30_000)


def test_seeds_of_any_size_are_different():
    for design in DESIGNS.values():
        assert not torch.equal(design.rows(2**32, 0, 64, 5).z, design.rows(0, 64, 128, 5).z)


def test_unknown_design():
    with pytest.raises(ValueError, match="design must be one of .* got 'latin'"):
        find_design("latin")


@pytest.mark.parametrize("name", sorted(DESIGNS))
@pytest.mark.parametrize(("k", "start", "count"), [(3, 0, 5), (40, 0, 15), (40, 12, 20), (40, 30, 75), (1100, 0, 2)])
def test_many_streams_are_the_streams_one_by_one(name, k, start, count):
    """Gram–Schmidt by Cholesky, whole blocks and parts of them, to rounding."""
    design, like = DESIGNS[name], torch.empty(0, dtype=torch.float64)
    for first in ([start] * 4, [start, start + 1, start, 0]):
        streams = [(seed, row) for seed, row in zip((5, 2**40, 0, 5), first, strict=True)]
        together = design.stacked(streams, count, k, like)
        for i, (seed, row) in enumerate(streams):
            alone = design.rows(seed, row, row + count, k)
            for part in ("z", "score", "weight"):
                torch.testing.assert_close(getattr(together, part)[i], getattr(alone, part), rtol=0, atol=1e-11)
    assert design.stacked([(1, 0)], 2, k, torch.empty(0)).z.dtype == torch.float32


def test_threads_do_not_change_the_draws():
    seeds, like, threads = range(50), torch.empty(0, dtype=torch.float64), torch.get_num_threads()
    expected = torch.stack([pilot_rows(seed, 8, 30) for seed in seeds])
    try:
        for count in (1, 4):
            torch.set_num_threads(count)
            assert torch.equal(pilot_stack(seeds, 8, 30, like), expected)
    finally:
        torch.set_num_threads(threads)


def test_pilots_of_seeds_that_repeat_are_the_same():
    like = torch.empty(0, dtype=torch.float64)
    for seeds in ([3, 5, 3, 3], [7, 7]):
        found = pilot_stack(seeds, 4, 9, like)
        assert torch.equal(found, torch.stack([pilot_rows(seed, 4, 9) for seed in seeds]))
    found[0].mul_(0)
    assert torch.equal(pilot_stack([7], 4, 9, like)[0], pilot_rows(7, 4, 9))


def test_more_rows_for_tau_begin_with_the_same():
    assert torch.equal(tau_rows(9, 5)[:4], tau_rows(4, 5))
    assert tau_rows(2, 5, torch.empty(0)).dtype == torch.float32


@pytest.mark.parametrize("rows", [10, 64])
def test_gram_schmidt_of_many(rows):
    given = torch.randn(5, rows, 64, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found = _orthonormal(given)
    torch.testing.assert_close(found @ found.mT, torch.eye(rows).double().expand(5, -1, -1), rtol=0, atol=1e-13)
    lower = given @ found.mT  # what it took: triangular, with positive diagonal
    torch.testing.assert_close(lower, lower.tril(), rtol=0, atol=1e-12)
    assert bool((lower.diagonal(dim1=-2, dim2=-1) > 0).all())


def test_float32_is_enough_for_float32():
    """Rows of many dimensions are made in the dtype they are used in: half the time, the same up to rounding."""
    design, k = find_design("orthogonal"), 1_500
    exact = design.rows(3, 20, 60, k)
    rounded = design.rows(3, 20, 60, k, torch.empty(0))
    assert rounded.z.dtype == torch.float32
    for name in ("z", "score", "weight"):
        torch.testing.assert_close(getattr(rounded, name).double(), getattr(exact, name), rtol=1e-5, atol=1e-5)
    stacked = design.stacked([(3, 20)], 40, k, torch.empty(0))
    assert torch.equal(stacked.z[0], rounded.z)
