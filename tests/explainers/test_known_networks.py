"""Networks trained at once are those trained separately, methods are compared at equal cost, and errors are paired."""

import shutil
import sys
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from scipy import stats

PAIRED = "SmoothHess minus it"


@pytest.fixture(scope="module")
def bench():
    """The scripts, imported as they import each other."""
    folder = str(Path(__file__).resolve().parents[2] / "benchmarks")
    sys.path.append(folder)  # last: one of them has the name of an installed package
    try:
        yield SimpleNamespace(networks=import_module("known_networks"), scores=import_module("interactions_networks"))
    finally:
        sys.path.remove(folder)


@pytest.fixture(scope="module")
def trained(bench, tmp_path_factory):
    """Tiny networks of each architecture, for one function."""
    sizes = replace(bench.networks.TINY, functions=("F10",), steps=10, transformer_steps=3, rows=300)
    scoring = replace(bench.scores.SMALL, sigmas=(0.4,), betas=(5.0,), steps=(1.0,), points=2, choosing=1)
    folder = tmp_path_factory.mktemp("networks")
    bench.networks.train_all(sizes, "cpu", folder)
    return bench.scores.Setup(folder, sizes, scoring)


@pytest.fixture(scope="module")
def relu(trained, tmp_path_factory):
    """The ReLU networks only, for what takes long."""
    folder = tmp_path_factory.mktemp("relu")
    shutil.copy(trained.folder / "relu.safetensors", folder)
    return replace(trained, folder=folder)


def test_the_networks_that_are_read_are_those_that_were_trained(bench, trained):
    n = bench.networks
    for architecture in n.ARCHITECTURES:
        ensemble = n.Ensemble.load(architecture, trained.sizes, trained.folder)
        assert len(ensemble.r2) == len(n.cells(trained.sizes)) == 6
        for cell, r2 in zip(n.cells(trained.sizes), ensemble.r2, strict=True):
            fitted, known = ensemble.fitted(cell), cell.known
            with torch.no_grad():
                found = fitted.net(fitted.standard(cell.rows(n.UNSEEN, n.NEW)))[:, 0].double()
            values, seen = known(cell.rows(n.UNSEEN, n.NEW)), known(cell.rows(10_000, n.TRAINING))
            targets = (values - seen.mean()) / seen.std()
            assert r2 == pytest.approx(float(1 - (found - targets).square().mean() / targets.var()), abs=1e-4)


def test_training_at_once_is_training_of_each(bench):
    n = bench.networks
    sizes = replace(n.TINY, functions=("F8",), seeds=1, steps=5, rows=300)
    data = n.Data.of(n.cells(sizes), sizes.rows, n.TRAINING, "cpu")
    together = n.initial("gelu", sizes, 2, "cpu")
    separate = {name: p.detach()[1].clone().requires_grad_() for name, p in together.items()}
    trainer = n.Trainer(n.ARCHITECTURES["gelu"](sizes), together, data, sizes)
    trainer.run(sizes.steps)

    net = n.ARCHITECTURES["gelu"](sizes)
    net.load_state_dict({name: p.detach() for name, p in separate.items()})
    optimizer, draws = torch.optim.Adam(net.parameters(), lr=sizes.rate), torch.Generator().manual_seed(0)
    for step in range(sizes.steps):
        optimizer.param_groups[0]["lr"] = n.learning_rate(step, sizes.steps, sizes.rate)
        index = torch.randint(sizes.rows, (2, sizes.batch), generator=draws)[1]
        optimizer.zero_grad()
        (net(data.inputs[1, index])[:, 0] - data.targets[1, index]).square().mean().backward()
        optimizer.step()
    for name, parameter in net.named_parameters():
        torch.testing.assert_close(together[name][1], parameter, rtol=1e-3, atol=1e-5)


def test_networks_that_are_there_are_not_trained_again(bench, trained, monkeypatch):
    monkeypatch.setattr(bench.networks, "Trainer", None)
    bench.networks.train_all(trained.sizes, "cpu", trained.folder)
    with pytest.raises(TypeError):  # other sizes need other networks
        bench.networks.train("relu", replace(trained.sizes, steps=11), "cpu", trained.folder)


def equal(rows, total):
    """Whether each method takes the passes that it was given, or as many whole points as fit."""
    for method, row in rows.items():
        assert 0 <= row["auc"] <= 1
        least = 0 if method.startswith(("Friedman", "SmoothHess, global")) or row["points"] < 4 else 0.8
        assert least * total <= row["passes"] <= 1.01 * total, (method, row)


def test_scores_of_equal_cost_are_kept_and_written(bench, trained, relu, monkeypatch):
    s = bench.scores
    assert s.score_all(relu, 1, ["own"])
    results = s.Store(relu.folder / "scores.jsonl", s.keys(relu)).read()
    assert len(results) == 2 * (1 + 2)  # one choice and two networks for each distribution
    total = relu.scoring.budgets[0] * relu.scoring.points
    for name, rows in results.items():
        if name.startswith("own"):
            equal(rows, total)
    chosen = {"smooth": {"64": {"sigma": 0.4, "n_calls": 60, "control": None}}, "step": 1.0}
    cell = bench.networks.Cell("F10", "independent", 1)
    equal(s.score(s.Job("transformer", cell, "own", 64), trained, chosen), total)

    monkeypatch.setattr(s, "score", None)  # everything is kept
    assert s.score_all(relu, 1, ["own"])
    text = "\n".join(s.page(relu))
    assert text.count(PAIRED) == 1 + 2  # the summary, and each distribution
    assert "ReLU MLP, correlated (2)" in text


def test_a_line_that_was_cut_off_and_other_networks_are_ignored(bench, tmp_path):
    s = bench.scores
    job = s.Job("relu", bench.networks.Cell("F1", "independent", 1), "own", 64)
    store = s.Store(tmp_path / "scores.jsonl", {"relu": "key"})
    store.append(job, {"CASO": {"auc": 0.5}})
    with store.path.open("a") as file:
        file.write('{"key": "key", "na')
    store.append(replace(job, budget=256), {"CASO": {"auc": 0.6}})
    assert {name: row["CASO"]["auc"] for name, row in store.read().items()} == {
        job.name: 0.5,
        f"{job.name[:-2]}256": 0.6,
    }
    assert s.Store(store.path, {"relu": "another"}).read() == {}


def test_tables_take_networks_of_which_all_functions_are_scored(bench):
    s, Cell = bench.scores, bench.networks.Cell
    sizes = replace(bench.networks.TINY, seeds=5)
    rng, results = torch.Generator().manual_seed(0), {}
    for function, seeds in (("F8", (1, 2, 3, 4)), ("F10", (1, 2, 3))):
        for seed in seeds:
            auc = torch.rand(2, generator=rng).tolist()
            rows = [{"auc": a, "points": 1, "passes": 64.0, "seconds": 0.0} for a in auc]
            job = s.Job("relu", Cell(function, "independent", seed), "own", 64)
            results[job.name] = dict(zip((s.REFERENCE, "CASO"), rows, strict=True))
            if seed == 1:
                results[replace(job, group="shapiq").name] = {"FSII": rows[0]}
    table = s.Table.of(results, "relu", "independent", 64, sizes)
    assert (table.networks, list(table.scores)) == (3, [s.REFERENCE, "CASO"])
    for number, function in zip(table.differences("CASO"), sizes.functions, strict=True):
        statistic, p = stats.ttest_rel(table.scores[s.REFERENCE][function], table.scores["CASO"][function])
        assert number.value / number.stderr == pytest.approx(float(statistic))
        assert number.differs() == (float(p) < 0.05)


@pytest.mark.parametrize("scale", [0.1, 0.7, 1.5, 4.0])
def test_a_difference_is_clear_where_the_t_test_is(bench, scale):
    values = [scale + x for x in (-1.0, 0.3, 0.2, 0.9, -0.4)]
    found = bench.scores.Number.of(values)
    _, p = stats.ttest_rel(values, [0.0] * 5)
    assert found.differs() == (float(p) < 0.05)
    assert found.stderr == pytest.approx(stats.sem(values))


def test_means_over_functions_add_variances(bench):
    Number = bench.scores.Number
    found = Number.over_functions([Number(1.0, 0.3, 4), Number(2.0, 0.4, 2)])
    assert (found.value, found.stderr) == (1.5, pytest.approx(0.25))
    assert found.degrees == pytest.approx((0.09 + 0.16) ** 2 / (0.09**2 / 4 + 0.16**2 / 2))  # Welch and Satterthwaite


def test_the_mean_of_two_functions_is_tested_as_by_welch(bench):
    """With degrees of freedom by Satterthwaite, the sum of two means is tested as the difference with the negative."""
    Number, (first, second) = bench.scores.Number, ([0.3, 1.1, 0.2, 0.9, -0.4], [0.8, 0.1, 0.9])
    for shift in (-0.4, 0.0, 0.3, 2.0):
        moved = [x + shift for x in first]
        found = Number.over_functions([Number.of(moved), Number.of(second)])
        p = stats.ttest_ind(moved, [-x for x in second], equal_var=False).pvalue
        assert found.differs() == (float(p) < 0.05)


def test_friedman_of_a_product_and_of_a_sum(bench):
    x = torch.randn(12, 10, generator=torch.Generator().manual_seed(0)).double()
    x = x - x.mean(0)
    ratio, numerator = bench.scores.friedman(lambda x: x[:, 0] * x[:, 1] + x[:, 2].exp() + x[:, 3], x)
    assert float(ratio[0]) == pytest.approx(1)  # centred: the product has no other effect
    assert float(numerator[0]) > 0.1
    assert float(numerator[1:].max()) < 1e-20


def test_the_script_runs_from_its_command_line(bench, relu, monkeypatch, tmp_path, capsys):
    s, page = bench.scores, tmp_path / "page.md"
    monkeypatch.setattr(bench.networks, "ARCHITECTURES", {"relu": s.ARCHITECTURES["relu"]})
    monkeypatch.setattr(s, "TINY", relu.sizes)
    monkeypatch.setattr(s, "SMALL", relu.scoring)
    command = f"interactions_networks.py all --tiny --folder {relu.folder} --groups own --write {page}"
    monkeypatch.setattr(sys, "argv", command.split())
    s.main()
    page.write_text(page.read_text().replace("<!-- the rest", "A remark.\n\n<!-- the rest"))
    s.main()
    assert page.read_text().count("A remark.") == 1
    assert "independent features, 64 passes per point" in page.read_text()
    capsys.readouterr()
