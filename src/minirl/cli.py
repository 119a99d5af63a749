"""`python -m minirl config|trace [--preset ...] [key=value ...]`, `python -m minirl explain launch|log FILE`.

in: a command and overrides -> out: the composed configuration, the table of one traced step, or an explained
script or log, on stdout.
verl: scripts/print_cfg.py (config)
"""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from omegaconf import OmegaConf

from minirl import presets
from minirl.config import compose
from minirl.errors import OneLineParser, run

_USAGE = """usage: python -m minirl COMMAND [--preset cpu|gpu|auto] [key=value ...]
  config   print the composed configuration (--resolve: with interpolations replaced)
  trace    run one training step and print what every station added (--json FILE: save it)
  explain  launch FILE | log FILE: what a launch script of verl asks for, what a log of verl says (- is stdin)
to train: python -m minirl.main_ppo [key=value ...]"""


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 0, or 2 for a user's error."""
    return run(_dispatch, argv)


def _dispatch(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help"):
        print(_USAGE)
        return 0 if argv else 2
    if argv[0] not in _COMMANDS:
        raise ValueError(f"unknown command {argv[0]}: use {' or '.join(_COMMANDS)}")
    return _COMMANDS[argv[0]](argv[1:])


def _config(argv: list[str]) -> int:
    parser = OneLineParser(prog="minirl config", description="Print the composed configuration as yaml.")
    parser.add_argument("--resolve", action="store_true", help="replace interpolations by their values")
    presets.add_arguments(parser)
    args = parser.parse_intermixed_args(argv)
    print(OmegaConf.to_yaml(compose(presets.overrides_of(args)), resolve=args.resolve), end="")
    return 0


def _trace(argv: list[str]) -> int:
    parser = OneLineParser(prog="minirl trace", description="Run one step; print what every station added.")
    parser.add_argument("--json", metavar="FILE", help="save the trace")
    presets.add_arguments(parser)
    args = parser.parse_intermixed_args(argv)
    one_step = ["trainer.total_training_steps=1", "trainer.val_before_train=false", "trainer.logger=[]"]
    config = compose([*presets.overrides_of(args), *one_step])
    from minirl.trace import (
        trace,
    )  # after the configuration is known to be good: the trainer loads transformers
    from minirl.trainer import PPOTrainer

    trainer = PPOTrainer(config)
    with trace(trainer) as recorded:
        trainer.fit()
    print(recorded.text())
    if args.json:
        recorded.to_json(args.json)
    return 0


def _explain(argv: list[str]) -> int:
    parser = OneLineParser(prog="minirl explain", description="Explain a launch script or a log of verl.")
    parser.add_argument("kind", choices=("launch", "log"))
    parser.add_argument("file", metavar="FILE", help="read as text, never run; - is stdin")
    args = parser.parse_args(argv)
    text = _text(args.file)
    from minirl.explain import explain_launch, parse_log  # here, as the other commands do not need the tables

    print((explain_launch if args.kind == "launch" else parse_log)(text).text())
    return 0


def _text(file: str) -> str:
    try:
        return sys.stdin.read() if file == "-" else Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else f"not UTF-8 at byte {error.start}"
        raise ValueError(f"FILE={file} cannot be read ({why}): give a text file, or - for stdin") from None


_COMMANDS: dict[str, Callable[[list[str]], int]] = {"config": _config, "trace": _trace, "explain": _explain}

if __name__ == "__main__":
    sys.exit(main())
