"""What messages quote of errors, and the names that they suggest."""

import pytest
from pydantic import TypeAdapter, ValidationError

from specbench.messages import in_one_line, suggest


def test_an_error_is_quoted_in_one_line() -> None:
    assert in_one_line(ValueError("\nno such field:\n  depth.\n")) == "no such field: depth"
    assert in_one_line(AssertionError()) == "AssertionError"
    assert in_one_line(KeyError("depth")) == "no such key: 'depth'"
    assert len(in_one_line(ValueError("word " * 200))) <= 240


def test_of_what_is_wrong_with_data_the_first_thing_is_quoted_with_its_place() -> None:
    with pytest.raises(ValidationError) as caught:
        TypeAdapter(dict[str, int]).validate_python({"depth": "deep", "rounds": "many"})
    assert in_one_line(caught.value).startswith("depth: Input should be a valid integer")


def test_the_nearest_name_is_suggested() -> None:
    assert suggest("ngrm", ["vanilla", "ngram"]) == " (did you mean 'ngram'?)"
    assert suggest("xyz", ["vanilla", "ngram"]) == ""
