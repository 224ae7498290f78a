"""`fxtrain config`: the questionnaire and its commands."""

from fxtrain.cli.config.questions import Question, next_question, read_answer, section_of

__all__ = ["Question", "next_question", "read_answer", "section_of"]
