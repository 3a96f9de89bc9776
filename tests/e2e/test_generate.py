"""`tparmpi generate`: text from a checkpoint, on any number of ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.e2e.launch import SMALL, run, tparmpi

PROMPT = "12 times é"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, text: Path) -> Path:
    folder = tmp_path_factory.mktemp("trained") / "run"
    options = ["--steps=60", "--set=train.lr=0.01", f"--data={text}"]
    done = run(
        tparmpi(2, "train", *SMALL, f"--run={folder}", *options), cwd=text.parent
    )
    assert done.code == 0, done.err
    return folder


def written(ranks: int, folder: Path, *options: str) -> str:
    arguments = ["generate", folder, f"--prompt={PROMPT}", *options]
    done = run(tparmpi(ranks, *arguments), cwd=folder)
    assert done.code == 0, done.err
    return done.out


@pytest.mark.parametrize("options", [["--temperature=0"], ["--seed=3"]])
def test_any_number_of_ranks_writes_the_same_text(trained, options):
    # More tokens than the model sees at once; five ranks are more than it has heads.
    texts = [written(n, trained, "--max-tokens=40", *options) for n in (1, 2, 3, 5)]
    assert len(set(texts)) == 1
    assert texts[0].startswith(PROMPT)
    assert len(texts[0]) > len(PROMPT) + 5


def test_another_seed_another_text(trained):
    options = ["--max-tokens=40", "--temperature=1"]
    seeds = {written(1, trained, *options, f"--seed={seed}") for seed in range(3)}
    assert len(seeds) == 3


def test_json_is_one_line(trained):
    plain = written(1, trained, "--max-tokens=20")
    (line,) = written(2, trained, "--max-tokens=20", "--json").splitlines()
    assert json.loads(line)["text"] + "\n" == plain
    assert json.loads(line)["prompt"] == PROMPT


def test_no_tokens_is_the_prompt(trained):
    assert written(2, trained, "--max-tokens=0") == PROMPT + "\n"


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["nowhere"], 1, "nowhere is no run folder"),
        (["{run}", "--prompt="], 2, "--prompt is empty"),
        (["{run}", "--max-tokens=-1"], 2, "--max-tokens is -1"),
        (["{run}", "--temperature=-1"], 2, "--temperature is -1"),
        (["{run}", "--temperature=nan"], 2, "--temperature is nan"),
    ],
)
def test_what_is_wrong_is_said_once(trained, tmp_path, arguments, code, words):
    filled = [argument.format(run=trained) for argument in arguments]
    refused = run(tparmpi(2, "generate", *filled), cwd=tmp_path, limit=30)
    assert refused.code == code
    (line,) = [line for line in refused.err.splitlines() if line.startswith("tparmpi")]
    assert words in line
    assert refused.out == ""


def test_a_run_without_a_checkpoint_is_said_so(trained, tmp_path):
    (tmp_path / "config.toml").write_bytes((trained / "config.toml").read_bytes())
    refused = run(tparmpi(1, "generate", tmp_path), cwd=tmp_path, limit=30)
    assert refused.code == 1
    assert "no checkpoint yet" in refused.err
