import builtins
import zipfile

import numpy as np
import pytest
import torch

from paper.expiration import simulate_visits
from paper.nhanes import _parsed, nhanes, parse_curve, read_manoeuvres
from paper.spirometry import N_SAMPLES, find_coughs
from paper.tests.sas_files import ibm_double, sas7bdat, xpt

LENGTHS = {
    "SEQN": 8,
    "SPATTYPE": 4,
    "SPAMANU": 8,
    "SPAFACT": 8,
    "SPAPOS": 8,
    "SPAACC": 1,
    "SPAQEFF": 1,
    "SPXPTS": 8,
    "SPXRAW": 3_000,
}


def points_of(volumes):
    """SPXRAW of a curve in litres at 10 ms: changes in whole mL that add up to it."""
    return np.diff(np.round(1_000 * np.asarray(volumes))).astype(int).tolist()


def lung(seconds=6.0, volume=3.0, tau=0.5, shut=(9.0, 9.0)):
    """One compartment that starts at 0.2 s and is shut for a while."""
    t = 0.01 * np.arange(round(seconds / 0.01) + 1)
    awake = np.clip(t - 0.2, 0, None) - np.clip(t - shut[0], 0, shut[1] - shut[0])
    return volume * (1 - np.exp(-awake / tau))


def record(seqn, number, volumes, *, factor=1.0, kind="Pre", accepted="Y", grade="A", **changed):
    points = points_of(volumes)
    whole = {
        "SEQN": float(seqn),
        "SPATTYPE": kind,
        "SPAMANU": float(number),
        "SPAFACT": factor,
        "SPAPOS": "Standing",
        "SPAACC": accepted,
        "SPAQEFF": grade,
        "SPXPTS": float(len(points)),
        "SPXRAW": ",".join(map(str, points)),
    }
    return {**whole, **changed}


def table(records):
    return {name: [r[name] for r in records] for name in LENGTHS}


COUGH = lung(volume=3.0, shut=(1.0, 1.6))
RECORDS = [
    record(41_475, 1, COUGH, accepted="N", grade="D"),
    record(41_475, 2, lung(volume=3.2), factor=1.1),
    record(41_475, 3, lung(volume=9.0), kind="Bron"),  # after the bronchodilator: not of this visit
    record(41_476, 1, lung(volume=2.0), grade="D", accepted="N"),  # "D" for another reason than a cough
    record(41_476, 2, lung(volume=2.2)),
    record(41_477, 1, COUGH, accepted="N", grade="D"),  # no acceptable effort
    record(41_478, 1, lung(volume=4.0)),
    record(41_478, 2, lung(volume=4.1, shut=(0.6, 0.9)), accepted="N", grade="D"),
    record(41_478, 3, COUGH, accepted="N", grade="D"),  # a second coughing effort of the same person
]


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "NHANES").mkdir()
    (tmp_path / "NHANES" / "spxraw_f.xpt").write_bytes(xpt(table(RECORDS), LENGTHS))
    return tmp_path


def closed_form_fev1(volume, tau):
    """The steepest 80 ms are the first after the start, so their tangent meets volume zero at the start itself."""
    return volume * (1 - np.exp(-1 / tau))


def test_coughing_efforts_with_the_best_fev1_of_their_visit(folder):
    found = nhanes(folder)
    assert found.source == "NHANES"
    assert "2 coughing efforts of 4 participants; 0 records left out" in found.note
    assert found.curves.shape == (2, N_SAMPLES)
    expected = sorted([1.1 * closed_form_fev1(3.2, 0.5), closed_form_fev1(4.0, 0.5)])
    assert sorted(found.fev1.tolist()) == pytest.approx(expected, abs=2e-3)  # points are whole mL
    first = int(found.fev1.argmin())
    t = 0.05 * np.arange(N_SAMPLES)
    at_50_ms = np.interp(t, 0.01 * np.arange(len(COUGH)), COUGH)
    np.testing.assert_allclose(found.curves[first].numpy(), at_50_ms, atol=6e-4)
    assert [(c.start, c.end) for c in found.coughs[first]] == [(1.0, 1.6)]
    assert [(c.start, c.end) for c in found.coughs[1 - first]] == [(0.6, 0.9)]


def test_volumes_are_sums_of_points_at_body_temperature(folder):
    manoeuvres = read_manoeuvres(folder / "NHANES" / "spxraw_f.xpt").manoeuvres
    assert [(m.participant, m.number, m.grade, m.acceptable) for m in manoeuvres[:2]] == [
        (41_475, 1, "D", False),
        (41_475, 2, "A", True),
    ]
    assert [m.before_bronchodilator for m in manoeuvres[:3]] == [True, True, False]
    assert manoeuvres[1].curve[-1].item() == pytest.approx(1.1 * lung(volume=3.2)[-1], abs=6e-4)
    # the last value is kept after the end of the record
    assert torch.equal(manoeuvres[0].curve[121:], manoeuvres[0].curve[120].expand(179))


def test_the_order_is_random_and_known(folder):
    assert torch.equal(nhanes(folder, seed=3).curves, nhanes(folder, seed=3).curves)
    orders = {tuple(nhanes(folder, seed=s).fev1.tolist()) for s in range(6)}
    assert len(orders) == 2


def test_a_simulated_visit_survives_the_format(tmp_path):
    visit = simulate_visits(1, seed=2)
    ten = np.interp(0.01 * np.arange(1_400), 0.05 * np.arange(300), visit.curves[0].numpy())
    whole = {**LENGTHS, "SPXRAW": 6_000}
    (tmp_path / "SPXRAW_G.XPT").write_bytes(xpt(table([record(7, 1, ten, grade="D")]), whole))
    got = read_manoeuvres(tmp_path / "SPXRAW_G.XPT").manoeuvres[0].curve
    torch.testing.assert_close(got[:280], visit.curves[0, :280], atol=1e-3, rtol=0)
    assert find_coughs(got[None]) == find_coughs(visit.curves)


@pytest.mark.parametrize(
    "broken",
    [
        {"SPXPTS": 5.0},
        {"SPXRAW": "1,2,x,4", "SPXPTS": 4.0},
        {"SPXRAW": ",".join(["300"] * 200), "SPXPTS": 200.0},
        {"SPXRAW": ",".join(["3"] * 99), "SPXPTS": 99.0},
        {"SPXRAW": ",".join(["0"] * 200), "SPXPTS": 200.0},
        {"SPAFACT": None},
        {"SPXRAW": "", "SPXPTS": 0.0},
    ],
    ids=["count", "letters", "range", "short", "no flow", "no factor", "empty"],
)
def test_a_bad_record_is_left_out_and_counted(tmp_path, broken):
    path = tmp_path / "SPXRAW_E.xpt"
    path.write_bytes(xpt(table([record(1, 1, lung()), record(2, 1, lung(), **broken)]), LENGTHS))
    reading = read_manoeuvres(path)
    assert (len(reading.manoeuvres), reading.n_left_out) == (1, 1)


def test_parse_curve_refuses_what_is_not_documented():
    for points, n, match in [("1,2", 3, "expected 3 points"), ("1,2.5", 2, "integers"), ("-64,2", 2, "-63 to 192")]:
        with pytest.raises(ValueError, match=match):
            parse_curve(points, 1.0, n)


def test_a_zip_holds_the_same_curves(folder, tmp_path):
    path = tmp_path / "SPXRAW_F.ZIP"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("spxraw_f.xpt", (folder / "NHANES" / "spxraw_f.xpt").read_bytes())
    got, expected = read_manoeuvres(path), read_manoeuvres(folder / "NHANES" / "spxraw_f.xpt")
    assert [m.fev1 for m in got.manoeuvres] == [m.fev1 for m in expected.manoeuvres]


def test_a_sas7bdat_holds_the_same_curves(folder, tmp_path):
    pytest.importorskip("pandas")
    raw = sas7bdat(table(RECORDS), LENGTHS)
    path = tmp_path / "spxraw_e.sas7bdat"
    path.write_bytes(raw)
    zipped = tmp_path / "SPXRAW_G.zip"
    with zipfile.ZipFile(zipped, "w") as archive:
        archive.writestr("spxraw_g.sas7bdat", raw)
    expected = read_manoeuvres(folder / "NHANES" / "spxraw_f.xpt").manoeuvres
    for file in (path, zipped):
        got = read_manoeuvres(file)
        assert got.n_left_out == 0
        assert [(m.participant, m.number, m.grade, m.fev1) for m in got.manoeuvres] == [
            (m.participant, m.number, m.grade, m.fev1) for m in expected
        ]
        assert all(torch.equal(a.curve, b.curve) for a, b in zip(got.manoeuvres, expected, strict=True))
    assert len(nhanes(tmp_path)) == 2  # the same people in three cycles


def test_without_pandas_the_remedy_is_told(tmp_path, monkeypatch):
    path = tmp_path / "spxraw_e.sas7bdat"
    path.write_bytes(b"x")
    real = builtins.__import__

    def no_pandas(name, *args, **kwargs):
        if name == "pandas":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", no_pandas)
    with pytest.raises(ImportError, match="pip install pandas"):
        read_manoeuvres(path)


def test_other_formats_are_refused(tmp_path, monkeypatch):
    monkeypatch.delenv("SMOOTHHESS_DATA", raising=False)
    with pytest.raises(ValueError, match="--data DIR"):
        nhanes()
    with pytest.raises(FileNotFoundError, match=r"expected SPXRAW_E, SPXRAW_F, SPXRAW_G as \.xpt, \.sas7bdat, \.zip"):
        nhanes(tmp_path)
    for name, content, match in [
        ("a.csv", b"SEQN,SPXRAW", r"expected \.xpt, \.sas7bdat, \.zip, got \.csv"),
        ("b.zip", b"PK no", "not a complete zip file"),
        ("c.xpt", b"SEQN,SPXRAW\n1,2", "c.xpt: expected a complete SAS file"),
        (
            "d.xpt",
            b"HEADER RECORD*******LIBV8   HEADER RECORD!!!!!!!" + b"0" * 30,
            "d.xpt: expected a complete SAS file",
        ),
    ]:
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ValueError, match=match):
            read_manoeuvres(tmp_path / name)
    with zipfile.ZipFile(tmp_path / "e.zip", "w") as archive:
        archive.writestr("readme.txt", "")
    with pytest.raises(ValueError, match=r"expected one \.sas7bdat or \.xpt file in it, got readme\.txt"):
        read_manoeuvres(tmp_path / "e.zip")
    (tmp_path / "f.xpt").write_bytes(xpt({"SEQN": [1.0]}, {"SEQN": 8}))
    with pytest.raises(ValueError, match="got none called SPATTYPE"):
        read_manoeuvres(tmp_path / "f.xpt")
    with pytest.raises(FileNotFoundError, match="no file of raw curves"):
        read_manoeuvres(tmp_path / "none.xpt")


def test_a_damaged_sas_file_is_refused(tmp_path):
    pytest.importorskip("pandas")
    (tmp_path / "x.sas7bdat").write_bytes(sas7bdat(table(RECORDS), LENGTHS)[:5_000])
    with pytest.raises(ValueError, match="expected a complete SAS file"):
        read_manoeuvres(tmp_path / "x.sas7bdat")
    (tmp_path / "y.sas7bdat").write_bytes(sas7bdat({"SEQN": [1.0], "OTHER": ["a"]}, {"SEQN": 8, "OTHER": 8}))
    with pytest.raises(ValueError, match="expected the fields of SPXRAW"):
        read_manoeuvres(tmp_path / "y.sas7bdat")


def test_ibm_numbers_are_those_of_the_published_example():
    assert ibm_double(-118.625).hex() == "c276a00000000000"  # the textbook example of IBM floating point
    assert ibm_double(1.0).hex() == "4110000000000000"


def test_a_zero_of_a_transport_file_is_a_zero(tmp_path):
    first = record(1, 1, lung())
    (tmp_path / "a.xpt").write_bytes(xpt(table([first, record(2, 1, lung(), SPXPTS=0.0)]), LENGTHS))
    with (tmp_path / "a.xpt").open("rb") as stream:
        assert [row["SPXPTS"] for row in _parsed(stream, ".xpt", "a.xpt")][1] == 0.0


def test_damaged_xpt_files_are_refused(tmp_path):
    whole = xpt(table(RECORDS), LENGTHS)
    for name, content in (("header", whole[: 9 * 80]), ("rows", whole[:-100])):
        path = tmp_path / f"{name}.xpt"
        path.write_bytes(content)
        with pytest.raises(ValueError, match=f"{name}.xpt: expected a complete SAS file"):
            read_manoeuvres(path)
