"""Where a run's configuration comes from, and what a resume may change."""

from __future__ import annotations

from dataclasses import fields

import pytest

from tparmpi.comm import launcher
from tparmpi.config import Environment
from tparmpi.errors import UsageError
from tparmpi.train import sources
from tparmpi.train.config import KEYS, RunConfig, check_resumable

TOML = "[train]\nsteps = 3\nlr = 1\n"
ENVIRONMENT = {"TPARMPI_TRAIN_STEPS": "4", "HOME": "/", "TPARMPI_DEVICE": "cpu"}


def test_each_source_wins_over_the_next():
    steps = [
        sources.resolve().train.steps,
        sources.resolve(toml=TOML).train.steps,
        sources.resolve(toml=TOML, environment=ENVIRONMENT).train.steps,
        sources.resolve(
            toml=TOML, environment=ENVIRONMENT, settings=["train.steps=5"]
        ).train.steps,
        sources.resolve(
            toml=TOML,
            environment=ENVIRONMENT,
            settings=["train.steps=5", "train.steps=6"],
        ).train.steps,
        sources.resolve(
            toml=TOML,
            environment=ENVIRONMENT,
            flags={"train.steps": ("--steps", 7)},
        ).train.steps,
    ]
    assert steps == [2000, 3, 4, 5, 6, 7]


def test_sources_are_merged_key_by_key():
    config = sources.resolve(
        toml="[model]\nn_layer = 2\nd_model = 64\n",
        environment={"TPARMPI_MODEL_N_LAYER": "3", "TPARMPI_MODEL_TIED": "False"},
        settings=["data.train = some where.txt"],
    )
    assert config.model.n_layer == 3
    assert config.model.d_model == 64
    assert config.model.tied is False
    assert config.data.train == "some where.txt"


def test_the_width_of_the_mlp_follows_the_model():
    assert sources.resolve(settings=["model.d_model=24"]).model.d_ff == 96
    assert sources.resolve(settings=["model.d_ff=51"]).model.d_ff == 51


@pytest.mark.parametrize("name", KEYS)
def test_every_key_has_a_default_of_its_type_and_an_environment_name(name):
    key = KEYS[name]
    assert type(key.default) is (type(None) if key.optional else key.type)
    assert key.variable == "TPARMPI_" + name.replace(".", "_").upper()
    if not key.optional:
        assert key.limits.complaint(key.default) is None


@pytest.mark.parametrize("name", [name for name in KEYS if KEYS[name].type is int])
def test_every_whole_number_has_a_limit_that_can_be_recorded(name):
    assert KEYS[name].limits.complaint(2**63).startswith("must be at most ")


@pytest.mark.parametrize(
    "compression", ["gzip", "9", "none", r"{'.*\.[mv]' = 9, 'a b' = 'none'}"]
)
def test_the_written_file_gives_the_same_configuration(compression):
    config = sources.resolve(
        settings=[
            'data.validation=a "b".txt',
            "train.lr=1e-4",
            "parallel.tp=3",
            f"checkpoint.compression={compression}",
        ]
    )
    assert sources.resolve(toml=sources.to_toml(config)) == config


def test_compression_is_one_for_all_or_a_table():
    table = "[checkpoint.compression]\n'.*norm.*' = \"none\"\n'.*' = 9\n"
    found = sources.resolve(toml=table).checkpoint.compression
    assert list(found.items()) == [(".*norm.*", "none"), (".*", 9)]
    given = {"TPARMPI_CHECKPOINT_COMPRESSION": "{'.*' = 'gzip'}"}
    found = sources.resolve(toml=table, environment=given).checkpoint.compression
    assert found == {".*": "gzip"}
    flat = sources.resolve(toml=table, settings=["checkpoint.compression=1"])
    assert flat.checkpoint.compression == 1
    assert sources.resolve().checkpoint.compression == "none"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            {"settings": ["model.nlayer=4"]},
            ["unknown key 'model.nlayer' in --set", "'model.n_layer'"],
        ),
        (
            {"settings": ["n_layer=4"]},
            ["unknown key 'n_layer'", "'model.n_layer'"],
        ),
        (
            {"toml": "[train]\nwarmupp = 1\n", "toml_name": "a.toml"},
            ["'train.warmupp' in a.toml", "'train.warmup'"],
        ),
        (
            {"toml": "[modle]\nn_layer = 1\n"},
            ["unknown section 'modle'", "'model'"],
        ),
        (
            {"toml": "n_layer = 2\n"},
            ["unknown key 'n_layer'", "'model.n_layer'", "[section]"],
        ),
        ({"toml": "steps = 1\n"}, ["unknown key 'steps'", "'train.steps'"]),
        (
            {"toml": "train = 3\n", "toml_name": "a.toml"},
            ["train must be a table, a.toml gives 3", "[train]"],
        ),
        ({"toml": "[[model]]\n"}, ["model must be a table"]),
        ({"toml": f"[train]\nseed = {'9' * 5000}\n"}, ["is not a TOML file"]),
        (
            {"settings": [f"train.seed={2**63}"]},
            ["train.seed must be at most 9223372036854775807, --set gives 9223"],
        ),
        ({"settings": [f"train.steps={10**18}"]}, ["train.steps must be at most 999"]),
        (
            {"settings": [f"train.steps={2**32}", f"train.batch_size={2**32}"]},
            ["train.steps (4294967296) times train.batch_size", "at most 9223"],
        ),
        (
            {"flags": {"data.train": ("--data", "a\udcff.txt")}},
            ["data.train must be UTF-8", "'a\\udcff.txt'"],
        ),
        ({"toml": '[data]\ntrain = "a\\u0000b"\n'}, ["null character"]),
        ({"toml": "steps = \n", "toml_name": "a.toml"}, ["a.toml is not a TOML"]),
        (
            {"environment": {"TPARMPI_TRAIN_STEP": "1"}},
            ["'TPARMPI_TRAIN_STEP' in the environment", "'TPARMPI_TRAIN_STEPS'"],
        ),
        (
            {"environment": {"TPARMPI_STEPS": "5"}},
            ["unknown variable 'TPARMPI_STEPS'", "'TPARMPI_TRAIN_STEPS'"],
        ),
        (
            {"environment": {"TPARMPI_TRIAN_STEPS": "5"}},
            ["unknown variable 'TPARMPI_TRIAN_STEPS'", "'TPARMPI_TRAIN_STEPS'"],
        ),
        (
            {"environment": {"TPARMPI_DEVCIE": "cpu"}},
            ["unknown variable 'TPARMPI_DEVCIE'", "'TPARMPI_DEVICE'"],
        ),
        ({"settings": ["lr=1"]}, ["unknown key 'lr'", "'train.lr'"]),
        ({"settings": ["data.train="]}, ["data.train must not be empty"]),
        ({"settings": ["train.steps"]}, ["--set train.steps", "section.key=value"]),
        (
            {"settings": ["train.steps=many"]},
            ["train.steps must be a whole number", "--set gives 'many'"],
        ),
        ({"settings": ["model.tied=1"]}, ["model.tied must be true or false"]),
        ({"toml": "[train]\nsteps = 1.5\n"}, ["train.steps must be a whole number"]),
        ({"toml": "[train]\nsteps = true\n"}, ["train.steps must be a whole number"]),
        ({"toml": "[data]\ntrain = 3\n"}, ["data.train must be text"]),
        (
            {"environment": {"TPARMPI_TRAIN_STEPS": "0"}},
            ["train.steps must be at least 1", "TPARMPI_TRAIN_STEPS gives 0"],
        ),
        (
            {"settings": ["checkpoint.compression=lzf"]},
            ["checkpoint.compression must be 'gzip', a level", "--set gives 'lzf'"],
        ),
        (
            {"toml": "[checkpoint.compression]\n'.*' = 10\n"},
            ["checkpoint.compression must be 'gzip'", "it is 10", "{'.*': 10}"],
        ),
        (
            {"settings": ["checkpoint.compression={'(' = 9}"]},
            ["checkpoint.compression has '(', which is no regular expression"],
        ),
        (
            {"settings": ["checkpoint.compression={'\udcff' = 9}"]},
            ["checkpoint.compression must be UTF-8"],
        ),
        (
            {"settings": ["checkpoint.compression=true"]},
            ["compression must be text or a whole number or a table", "gives True"],
        ),
        ({"settings": ["train.lr=0"]}, ["train.lr must be more than 0"]),
        ({"settings": ["train.lr=nan"]}, ["train.lr must be a finite number"]),
        ({"settings": ["model.dropout=1"]}, ["model.dropout must be less than 1"]),
        (
            {"settings": ["train.precision=bf16"]},
            ["train.precision must be one of float32, float64"],
        ),
        (
            {
                "settings": ["parallel.tp=4"],
                "flags": {"parallel.tp": ("--tp", 2)},
            },
            ["--tp 2", "parallel.tp=4", "disagree"],
        ),
    ],
)
def test_what_is_wrong_is_refused_with_its_source(arguments, words):
    with pytest.raises(UsageError) as refused:
        sources.resolve(**arguments)
    for word in words:
        assert word in str(refused.value)
    assert "\n" not in str(refused.value).strip()


def test_variables_of_the_package_itself_are_known():
    names = [f"TPARMPI_{field.name}".upper() for field in fields(Environment)]
    assert "TPARMPI_DEVICE" in names
    sources.check_environment(dict.fromkeys([*names, launcher._PROCESS], "1"))


def test_a_resume_may_change_layout_length_and_intervals():
    recorded = RunConfig()
    asked = recorded.replace(
        {
            "parallel.tp": 2,
            "parallel.dp": 3,
            "parallel.microbatches": 4,
            "train.steps": 9,
            "train.eval_every": 9,
            "checkpoint.every": 9,
            "checkpoint.keep": 9,
            "checkpoint.compression": {".*": 9},
            "data.train": "moved.txt",
        }
    )
    check_resumable(asked, recorded, "runs/x")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("model.d_model", 64),
        ("model.dropout", 0.1),
        ("train.seed", 2),
        ("train.precision", "float64"),
        ("train.batch_size", 8),
        ("train.lr", 0.5),
    ],
)
def test_a_resume_may_not_change_the_mathematics(name, value):
    recorded = RunConfig()
    with pytest.raises(UsageError) as refused:
        check_resumable(recorded.replace({name: value}), recorded, "runs/x")
    for word in (name, repr(value), repr(recorded.get(name)), "runs/x", "--run"):
        assert word in str(refused.value)


def test_all_keys_that_differ_are_named():
    recorded = RunConfig()
    asked = recorded.replace({"model.d_model": 64, "train.seed": 1})
    with pytest.raises(UsageError, match=r"model\.d_model .* other .*train\.seed"):
        check_resumable(asked, recorded, "runs/x")
