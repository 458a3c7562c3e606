"""Flags made from a dataclass."""

from dataclasses import dataclass, field

import pytest

from jpaged.cli import Parser, add_flags, from_flags, integer
from jpaged.config import EngineConfig
from jpaged.serve.config import ServeConfig


@dataclass(frozen=True)
class Config:
    name: str = "x"
    max_things: int = field(default=16, metadata={"help": "things, at most 50 %"})
    limit: int | None = None
    share: float = 0.5
    path: str | None = None
    is_on: bool = True
    quiet: bool = field(default=False, metadata={"off": "--loud"})
    kind: str = field(default="a", metadata={"choices": ("a", "b")})
    names: tuple[str, ...] = ()
    key: tuple[str, ...] = field(default=(), metadata={"env": "TEST_CLI_KEY"})


def parse(*argv: str, config_class=Config):
    parser = Parser(prog="test", allow_abbrev=False)
    add_flags(parser, config_class, "flags")
    return from_flags(config_class, parser.parse_args(argv))


def test_without_flags_the_config_has_its_own_defaults():
    assert parse() == Config()


@pytest.mark.parametrize(
    ("argv", "field_name", "value"),
    [
        (["--name", "y"], "name", "y"),
        (["--max-things", "4k"], "max_things", 4000),
        (["--max_things=4K"], "max_things", 4096),
        (["--limit", "auto"], "limit", None),
        (["--limit", "1.5K"], "limit", 1536),
        (["--share", "0.25"], "share", 0.25),
        (["--path", "/a_b"], "path", "/a_b"),
        (["--no-is-on"], "is_on", False),
        (["--is-on"], "is_on", True),
        (["--loud"], "quiet", False),
        (["--kind", "b"], "kind", "b"),
        (["--names", "a", "b", "--names", "c"], "names", ("a", "b", "c")),
    ],
)
def test_a_flag_sets_its_field(argv, field_name, value):
    result = getattr(parse(*argv), field_name)
    assert (tuple(result) if isinstance(result, list) else result) == value


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--max-things", "many"], "must be an integer like 4096, 4k (4000) or 4K (4096), got 'many'"),
        (["--max-things", "1.5"], "must be a whole number, got '1.5'"),
        (["--kind", "c"], "invalid choice"),
        (["--nonsense"], "unrecognized arguments: --nonsense"),
        (["--max-thing", "1"], "unrecognized arguments"),  # no abbreviations: they break when flags are added
    ],
)
def test_a_wrong_flag_is_one_line_and_status_2(argv, says, capsys):
    with pytest.raises(SystemExit) as caught:
        parse(*argv)
    assert caught.value.code == 2
    error = capsys.readouterr().err
    assert says in error and error.count("\n") == 1


def test_an_api_key_may_come_from_the_environment(monkeypatch):
    monkeypatch.setenv("TEST_CLI_KEY", "secret")
    assert parse().key == ("secret",)
    assert list(parse("--key", "other").key) == ["other"]


@pytest.mark.parametrize("config_class", [EngineConfig, ServeConfig])
def test_every_field_of_the_real_configs_is_a_flag_with_help(config_class, capsys):
    with pytest.raises(SystemExit):
        parse("--help", config_class=config_class)
    text = capsys.readouterr().out
    for name in config_class.__dataclass_fields__:
        assert f"--{name.replace('_', '-')}" in text
    assert parse(config_class=config_class) == config_class()


def test_users_of_vllm_find_their_flags():
    config = parse("--gpu-memory-utilization", "0.5", "-tp", "2", "--max-model-len", "auto", config_class=EngineConfig)
    assert (config.device_memory_utilization, config.tensor_parallel_size, config.max_model_len) == (0.5, 2, None)


def test_a_flag_may_be_json(capsys):
    text = '{"method": "ngram", "num_speculative_tokens": 3}'
    config = parse("--speculative-config", text, config_class=EngineConfig).speculative_config
    assert (config.num_speculative_tokens, config.prompt_lookup_max) == (3, 4)
    assert parse("--speculative-config", "none", config_class=EngineConfig).speculative_config is None
    with pytest.raises(SystemExit):
        Parser(prog="test").parse(["--speculative-config", '{"method": "draft_model"}'])
    assert "method must be ngram, got 'draft_model'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "value"), [("1k", 1000), ("1K", 1024), ("2M", 2**21), ("3g", 3 * 10**9), ("-1", -1), ("1_000", 1000)]
)
def test_sizes(text, value):
    assert integer(text) == value


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"port": 70000}, r"port must be in \[0, 65535\], got 70000"),
        ({"max_body_size": 0}, "max_body_size must be at least 1, got 0"),
        ({"shutdown_timeout": -1}, "shutdown_timeout must not be negative, got -1"),
        ({"api_key": (" ",)}, "api_key must not be blank"),
        ({"ssl_keyfile": "a"}, "ssl_keyfile and ssl_certfile need each other"),
        ({"root_path": "a"}, "root_path must start with /, got 'a'"),
    ],
)
def test_a_server_config_that_cannot_work_is_refused(fields, says):
    with pytest.raises(ValueError, match=says):
        ServeConfig(**fields)
