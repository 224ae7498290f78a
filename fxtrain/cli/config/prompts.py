"""Asks questions: with arrow keys in a terminal, line by line elsewhere."""

import importlib.util
import sys
from collections.abc import Callable
from typing import Any

import click

from fxtrain._optional import optional
from fxtrain.cli.config.questions import (
    Question,
    next_question,
    problem_with,
    read_answer,
    section_of,
)
from fxtrain.errors import PlanError
from fxtrain.launchers.config.defaults import Machine
from fxtrain.launchers.config.launch_file import Section

# A prompt takes a question and returns what was typed or chosen.
AskFunction = Callable[[Question], str]


def interview(machine: Machine, ask: AskFunction) -> Section:
    """Ask until no question remains; repeat a question after an invalid answer.

    Raises:
        PlanError: the input ended before the questions.
    """
    answers: dict[str, Any] = {}
    while question := next_question(answers, machine):
        text = ask(question)
        try:
            value = read_answer(question, text)
        except ValueError as error:
            click.echo(f"  {error}", err=True)
            continue
        if problem := problem_with(question, value, answers, machine):
            click.echo(f"  {problem}", err=True)
            continue
        answers[question.path] = value
    return section_of(answers)


def choose_prompt() -> AskFunction:
    """Arrow keys if there is a terminal and questionary is installed; otherwise lines."""
    terminal = sys.stdin.isatty() and sys.stdout.isatty()
    return arrow_keys if terminal and importlib.util.find_spec("questionary") else line_by_line


def line_by_line(question: Question) -> str:
    """Print a question and read a line.

    Raises:
        PlanError: the input has ended.
    """
    click.echo(question.text)
    for number, (name, meaning) in enumerate(question.choices, 1):
        click.echo(f"  {number}. {name}{': ' * bool(meaning)}{meaning}")
    click.echo(f"[{_shown(question)}]> ", nl=False)
    line = sys.stdin.readline()
    if not line:
        raise PlanError(
            f"No answer to {question.text!r}: the input ended. `fxtrain config default` asks "
            f"nothing."
        )
    if not sys.stdin.isatty():
        click.echo(line.rstrip("\n"))  # so that a log reads like a session
    return line


def arrow_keys(question: Question) -> str:
    """Ask on a terminal.

    Raises:
        KeyboardInterrupt: the user pressed Ctrl-C.
        MissingPackageError: questionary is not installed (the extra `cli`).
    """
    q = optional("questionary", extra="cli", needed_by="fxtrain config with arrow keys")
    if question.kind == "choice":
        width = max(len(name) for name, _ in question.choices)
        picked = [
            q.Choice(f"{name:{width}}  {meaning}".rstrip(), value=name)
            for name, meaning in question.choices
        ]
        return q.select(question.text, choices=picked, default=question.default).unsafe_ask()
    if question.kind == "yes":
        return "yes" if q.confirm(question.text, default=question.default).unsafe_ask() else "no"

    def fits(said: str) -> bool | str:
        try:
            read_answer(question, said)
        except ValueError as error:
            return str(error)
        return True

    return q.text(question.text, default=_shown(question), validate=fits).unsafe_ask()


def _shown(question: Question) -> str:
    if question.kind == "yes":
        return "yes" if question.default else "no"
    if isinstance(question.default, list):
        return ",".join(question.default)
    return "" if question.default is None else str(question.default)
