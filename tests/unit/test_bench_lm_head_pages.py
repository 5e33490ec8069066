"""What the lm_head benchmark makes of its result file, tables and picture, and the pages with the committed one."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bench_lm_head import main
from lm_head_exact import NUM_ROWS, NUM_TOKENS
from lm_head_report import MARKER, README_IMPLS, between_markers, shortened
from lm_head_tables import ERRORS, by_impl, make_markdown, slowdown

ROOT = Path(__file__).resolve().parents[2]
RECORD = ROOT / "bench" / "results" / "lm_head_h200.json"
AGAIN = RECORD.with_name("lm_head_h200_own_6346899.json")


def made_up(impl, milliseconds, *, op="train", shape=(896, 151936), floor=10.0, **values):
    return {
        "op": op,
        "impl": impl,
        "T": 16384,
        "H": shape[0],
        "V": shape[1],
        "ms_p20": milliseconds and milliseconds - 0.75,
        "ms_p50": milliseconds,
        "ms_p80": milliseconds and milliseconds + 1.5,
        "repeats": 0 if milliseconds is None else 9,
        "gemm_floor_ms": floor,
        "peak_gib": 1.5,
        "max_abs_logp_err": 2e-6,
        "max_abs_entropy_err": None,
        "rel_dx_err": 1.4e-3,
        "rel_dw_err": 1.6e-3,
        "error": None,
        "versions": {"torch": "2.11.0"},
        "commit": "abc1234",
    } | values


@pytest.fixture
def result_file(tmp_path):
    wide = (4096, 128256)
    rows = [
        made_up("slow one", 31.0),
        made_up("slow one", None, shape=wide, floor=20.0, error="out of memory", peak_gib=None),
        made_up("fastgrpo", 11.0),
        made_up("fastgrpo", 21.0, shape=wide, floor=20.0, peak_gib=2.25, max_abs_logp_err=7e-6),
        made_up("absent", None, error="not installed: absent", peak_gib=None),
        made_up("absent", None, shape=wide, error="not installed: absent", peak_gib=None),
        made_up("fastgrpo", 4.0, op="nograd", floor=3.2),
        made_up("fastgrpo", 50.0, op="memory", floor=None, beyond_gradients_gib=0.75),
        made_up("fastgrpo, 1 GiB", None, op="memory", floor=None, error="does not fit the free memory"),
    ]
    data = [{"T": 16384, "H": 896, "V": 151936, "mean_entropy": 0.61, "reference_lse_err": 1e-6}]
    path = tmp_path / "lm_head_test.json"
    path.write_text(json.dumps({"device": "Test 9000", "data": data, "rows": rows}))
    return path


@pytest.fixture
def page(tmp_path):
    path = tmp_path / "page.md"
    path.write_text(f"before\n{MARKER}\nold\n{MARKER}\nafter\n")
    return path


def test_render_without_a_gpu(result_file, page, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    readme = page.with_name("README.md")
    readme.write_text(page.read_text())
    for _ in range(2):  # the second time changes nothing
        assert main(["--render", str(result_file), "--readme", str(page)]) == 0
        printed = capsys.readouterr().out.strip()
        assert page.read_text() == f"before\n{MARKER}\n{printed}\n{MARKER}\nafter\n"
    assert page.read_text().count("absent") == 1 * 2
    assert main(["--render", str(result_file), "--readme", str(readme)]) == 0
    short = readme.read_text()
    assert "| fastgrpo | 11.0 (10.2-12.5) 1.10 x | 21.0 (20.2-22.5) 1.05 x |" in short  # the README's peers alone
    assert not any(word in short for word in ("slow one", "absent", "Memory of", "does not fit"))
    assert result_file.with_suffix(".png").read_bytes().startswith(b"\x89PNG")

    lines = printed.splitlines()
    assert lines[0] == "Test 9000; torch 2.11.0; commit abc1234. Mean entropy of the rows 0.61 to 0.61 nats."
    assert lines[2].startswith("Times are medians of 9 calls in ms, p20-p80 in brackets,")
    assert "not a bound: cuBLAS chooses its kernels by shape" in lines[2]
    assert f"on a sample of {NUM_ROWS} rows and {NUM_TOKENS} rows of the weight" in lines[2]
    assert "Peak memory (above the inputs) and errors are the largest over the shapes." in lines[2]
    head = next(line for line in lines if line.startswith("|  | 896"))
    columns = ["largest peak", *ERRORS.values()]
    assert head == f"|  | 896 / 151936 | 4096 / 128256 | {' | '.join(columns)} |"
    assert all(name.startswith("largest ") for name in columns)
    start = lines.index(head)
    assert lines[start + 2 : start + 4] == [
        "| fastgrpo | 11.0 (10.2-12.5) 1.10 x | 21.0 (20.2-22.5) 1.05 x | 2.25 GiB | 7.0e-06 |  | 1.4e-03 | 1.6e-03 |",
        "| slow one | 31.0 (30.2-32.5) 3.10 x | - | 1.50 GiB | 2.0e-06 |  | 1.4e-03 | 1.6e-03 |",
    ]
    assert "Not measured: slow one at 4096 / 128256 (out of memory); absent (not installed: absent)." in lines
    assert "| fastgrpo | 4.0 (3.2-5.5) 1.25 x | 1.50 GiB | 2.0e-06 |  | 1.4e-03 | 1.6e-03 |" in lines
    assert "| 16384 | 1.50 GiB, 0.75 GiB, 50.0 ms | does not fit the free memory |" in lines


def test_several_commits_are_named_with_their_shapes(result_file):
    content = json.loads(result_file.read_text())
    for row in content["rows"]:
        row["commit"] = "abc1234" if row["H"] == 896 else "63468991783621302ac4fa3cb4dc59e67928c8f4"
    content["rows"].append(made_up("fastgrpo", 12.0, op="row", shape=(1536, 151936)))
    header = make_markdown(content).splitlines()[0]
    assert "; commit abc1234 at 896 / 151936 and 1536 / 151936, 6346899178 at 4096 / 128256. " in header


def test_calls_of_different_number_are_both_named(result_file):
    content = json.loads(result_file.read_text())
    content["rows"][0]["repeats"] = 3
    assert "Times are medians of 3-9 calls" in make_markdown(content)


def test_a_nan_is_not_lost_among_the_shapes(result_file):
    content = json.loads(result_file.read_text())
    content["rows"][3]["max_abs_logp_err"] = math.nan
    line = next(line for line in make_markdown(content).splitlines() if line.startswith("| fastgrpo | 11"))
    assert "| nan |" in line


@pytest.mark.parametrize(
    ("file", "content", "reason"),
    [
        ("none.json", None, "cannot read {}: No such file or directory"),
        (".", None, "cannot read {}: Is a directory"),
        ("bytes.png", b"\x89PNG", "cannot read {}: not a text file"),
        ("README.md", b"# A page", "{} is no result of bench_lm_head.py: not JSON"),
        ("list.json", b"[]", "{} is no result of bench_lm_head.py: not an object with a device"),
        ("other.json", b'{"device": "x", "data": []}', "{} is no result of bench_lm_head.py: it has no list of rows"),
        (
            "thin.json",
            b'{"device": "x", "data": [{"T": 1, "H": 2, "V": 3}], "rows": []}',
            "data[0] has no mean_entropy",
        ),
        ("row.json", b'{"device": "x", "data": [], "rows": [3]}', "rows[0] has no H, T, V, commit, error,"),
        (ROOT / "bench" / "results" / "sync_h200.json", None, "{} is no result of bench_lm_head.py: not an object"),
    ],
)
def test_what_is_no_result_is_refused_in_a_line(file, content, reason, tmp_path, page):
    path = tmp_path / file
    if content is not None:
        path.write_bytes(content)
    before = sorted(tmp_path.iterdir()), page.read_text()
    with pytest.raises(SystemExit) as refused:
        main(["--render", str(path), "--readme", str(page)])
    assert reason.format(path) in str(refused.value) and "\n" not in str(refused.value)
    assert before == (sorted(tmp_path.iterdir()), page.read_text())


@pytest.mark.parametrize(
    ("text", "reason"),
    [("nothing here\n", "twice, around the table's place; it is there 0 times"), (None, "No such file or directory")],
)
def test_a_page_without_a_place_is_refused_before_anything_is_written(text, reason, result_file, tmp_path):
    readme = tmp_path / "README.md"
    if text:
        readme.write_text(text)
    with pytest.raises(SystemExit, match=reason):
        main(["--render", str(result_file), "--readme", str(readme)])
    assert not result_file.with_suffix(".png").exists()
    assert (readme.read_text() if text else readme.exists()) == (text or False)


def test_render_needs_no_kernels(result_file):
    code = (
        "import sys; sys.modules['fastgrpo_kernels'] = sys.modules['triton'] = None; import bench_lm_head; "
        "sys.exit(bench_lm_head.main(sys.argv[1:]))"
    )
    command = [sys.executable, "-c", code, "--render", str(result_file)]
    done = subprocess.run(command, cwd=ROOT / "bench", capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert "| fastgrpo | 11.0 (10.2-12.5) 1.10 x |" in done.stdout


# ---- the committed results and the pages made of them


@pytest.fixture(scope="module")
def record():
    return json.loads(RECORD.read_text())


@pytest.mark.parametrize("name", ["README.md", "docs/kernels.md"])
def test_pages_show_what_the_record_holds(record, name):
    page = ROOT / name
    shown = shortened(record) if page.name == "README.md" else record
    assert between_markers(page, make_markdown(shown)) == page.read_text()


def test_the_short_tables_show_each_peer_at_its_best(record):
    """Of the variants of one public kernel with the same objective the fastest at most shapes stands in the README."""
    for op, start in (
        ("train", "Liger fused linear GRPO"),
        ("train", "CCE"),
        ("ce", "Liger fused linear CE"),
        ("nograd", "CCE"),
    ):
        variants = by_impl([row for row in record["rows"] if row["op"] == op and row["impl"].startswith(start)])
        (shown,) = [name for name in variants if name in README_IMPLS]
        for shape, row in variants[shown].items():
            assert row["ms_p50"] == min(cells[shape]["ms_p50"] for cells in variants.values()), (shown, shape)


def test_the_figures_of_the_second_run_are_its_own():
    """docs/kernels.md and docs/decisions.md give its multiples of the floor."""
    rows = json.loads(AGAIN.read_text())["rows"]
    found = {
        (row["op"], row["H"]): slowdown(row) for row in rows if row["impl"] == "fastgrpo" and row["op"] != "memory"
    }
    numbers = [f"{found[op, hidden]:.2f}" for op in ("train", "nograd") for hidden in (896, 1536)]
    assert {row["commit"] for row in rows} == {"63468991783621302ac4fa3cb4dc59e67928c8f4"}
    sentence = "{} and {} x the floor in training, {} and {} x without".format(*numbers)
    for name in ("kernels.md", "decisions.md"):
        text = " ".join((ROOT / "docs" / name).read_text().split())
        assert sentence in text and AGAIN.name in text, name
