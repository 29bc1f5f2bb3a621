"""What is said of knobs: all of them, with their defaults, and what they mean."""

from dataclasses import fields

import pytest

from specbench import knobs, registry
from specbench.cli import main
from specbench.depth import CONTROLLERS, Choice


@pytest.mark.parametrize("name", registry.sources())
def test_every_knob_of_every_method_is_explained(name: str) -> None:
    method = registry.load_method(name)
    found = {knob.name: knob for knob in knobs.method_knobs(method)}
    assert set(found) == {field.name for field in fields(method.Config)}
    assert all(knob.meaning for knob in found.values())
    assert found["depth"].default == str(method.Config().depth)


def test_every_knob_of_every_controller_is_explained() -> None:
    found = knobs.controller_knobs()
    assert set(found) == set(CONTROLLERS)
    assert all(knob.meaning for own in found.values() for knob in own)
    assert found["by_batch"] == [knobs.Knob("depths", "to be given", found["by_batch"][0].meaning)]
    assert [knob.name for knob in found["survival"]] == ["probe"]
    for name, own in found.items():
        plain = [k for k in own if k.default.replace(".", "").isdigit()]
        text = ",".join(f"{knob.name}={knob.default}" for knob in plain)
        if len(plain) == len(own):
            assert Choice.read(f"{name}:{text}").name == name


def test_methods_shows_the_knobs_of_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["methods", "ngram"]) == 0
    shown = capsys.readouterr().out
    assert "min_match" in shown and "off_above_batch" in shown
    assert main(["methods", "ngrm"]) == 2
    assert "did you mean 'ngram'" in capsys.readouterr().err
