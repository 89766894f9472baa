"""`shoal bench sharing --simulate`: policies side by side; what is wrong is said before anything starts."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from infra.cli.main import call
from infra.lab.simulator.trace_csv import read_csv

ROOT = Path(__file__).parents[3]
SMALL = ["--devices", "16", "--apps", "1"]
TRACE = "job,submit_s,duration_s,devices,group,min_groups,max_groups\na,0,3600,4,2,1,4\nb,1800,3600,8,,,\n"


@pytest.fixture
def trace(tmp_path: Path) -> str:
    path = tmp_path / "trace.csv"
    path.write_text(TRACE)
    return str(path)


def bench(*arguments: str) -> int:
    return call(["bench", "sharing", *arguments])


def test_the_document_tells_what_was_assumed_and_what_came_out(
    trace: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench("--simulate", trace, *SMALL, "--json", "--cost", "start_s=100") == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["jobs"], document["devices"], document["serving_devices"]) == (2, 16, 8)
    assert (document["costs"]["start_s"], document["costs_from"]["start_s"]) == (100, "given")
    fixed, first, shoal = document["policies"]
    assert [fixed["policy"], first["policy"], shoal["policy"]] == ["fixed", "serving-first", "shoal"]
    # 8 devices for training: b waits until a is done at 3,700 s, and both start up for 100 s.
    assert fixed["queuing"]["mean_s"] == pytest.approx((0 + 3700 - 1800) / 2, abs=2)
    assert fixed["completion"]["mean_s"] == pytest.approx((3700 + 3700 + 3700 - 1800) / 2, abs=2)
    assert shoal["queuing"]["mean_s"] < 10
    for row in document["policies"]:
        assert sum(row["use"].values()) == pytest.approx(1)
        assert row["unfinished"] == 0
    ratio = document["ratios"]["shoal"]["completion_mean"]
    assert ratio == pytest.approx(fixed["completion"]["mean_s"] / shoal["completion"]["mean_s"])


def test_the_table_shows_the_policies_side_by_side(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench("--simulate", trace, *SMALL, "--policy", "shoal,fixed", "--node-mtbf-h", "24") == 0
    shown = capsys.readouterr().out
    assert shown.index("shoal") < shown.index("fixed")
    for words in ("2 jobs of", "queuing, mean", "devices: training", "requests missed", "start_s 1.1"):
        assert words in shown


def test_a_generated_trace_can_be_kept_and_gives_the_same_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = tmp_path / "kept.csv"
    common = [*SMALL, "--policy", "shoal", "--json"]
    assert bench("--simulate", "philly:3", "--days", "0.2", *common, "--write-trace", str(kept)) == 0
    made = json.loads(capsys.readouterr().out)
    assert len(read_csv(kept.read_text(), str(kept)).jobs) == made["jobs"]
    assert bench("--simulate", str(kept), *common) == 0
    again = json.loads(capsys.readouterr().out)
    assert again["policies"] == made["policies"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--policy", "fixed"], "--policy needs --simulate TRACE"),
        (["--rounds", "3", "--cost", "start_s=1"], "--cost needs --simulate TRACE"),
        (["--simulate", "philly", "--rounds", "3"], "--rounds is of a measurement"),
        (["--simulate", "nowhere.csv"], "nowhere.csv cannot be read"),
        (["--simulate", "philly", "--policy", "fixed,best"], "there is no policy 'best'"),
        (["--simulate", "philly", "--policy", "fixed,fixed"], "names one of them twice"),
        (["--simulate", "philly", "--devices", "many"], "--devices many: should be a whole number above 0"),
        (["--simulate", "philly", "--devices", "8", "--apps", "4"], "too few for 4 apps with replicas of 2"),
        (["--simulate", "philly", "--tensor", "16"], "of 16 devices is on one node, and a node has 8"),
        (["--simulate", "philly", "--cost", "start_s=soon"], "--cost start_s=soon: should be seconds"),
        (["--simulate", "philly", "--costs", "nowhere.yaml"], "nowhere.yaml cannot be read"),
    ],
)
def test_what_is_wrong_is_said_in_a_sentence(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench(*arguments) == 2
    assert words in capsys.readouterr().err


def test_a_kind_of_accelerator_that_no_node_has_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "kinds.csv"
    path.write_text("job,submit_s,duration_s,devices,accelerator\na,0,60,4,H100-SXM\n")
    arguments = ["--simulate", str(path), "--policy", "shoal", "--json"]
    assert bench(*arguments) == 2
    assert "a can never run under the policy shoal: it takes 4 devices of H100-SXM" in capsys.readouterr().err
    assert bench(*arguments, "--devices", "A100-SXM:32,H100-SXM:32") == 0


def test_nothing_heavy_is_imported(trace: str) -> None:
    program = (
        "import sys\nfrom infra.cli.main import call\n"
        f"code = call(['bench', 'sharing', '--simulate', {trace!r}, '--policy', 'shoal', '--json'])\n"
        "heavy = [name for name in ('ray', 'torch', 'transformers', 'pyarrow') if name in sys.modules]\n"
        "sys.exit(code or ', '.join(heavy) or 0)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
