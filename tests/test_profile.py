"""A profile's file, and what does not pass for one."""

import json
from pathlib import Path
from typing import Any

import pytest

from specbench.depth.calibration import Sample
from specbench.profile import load_profile, step_table, write_profile
from specbench.profile_page import page
from specbench.tables import Note
from tests.made_profiles import made_passes, made_profile, made_steps


def test_a_profile_is_read_as_it_was_written(tmp_path: Path) -> None:
    path, profile = tmp_path / "new" / "profile.json", made_profile()
    write_profile(path, profile)
    assert load_profile(path) == profile
    assert [one.name for one in path.parent.iterdir()] == ["profile.json"]


def edited(whole: dict[str, Any], **changes: Any) -> str:
    return json.dumps(whole | changes)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "no profile .* makes one"),
        ("{", "is not a readable profile"),
        ("[]", "is no profile; valid: a file of `specbench profile --out`"),
        ('{"schema": 3, "id": "x", "settings": {}}', "is no profile"),
        ('{"kind": "profile", "schema": 99}', "has schema version 99"),
    ],
)
def test_what_is_no_profile_is_refused(tmp_path: Path, text: str | None, message: str) -> None:
    path = tmp_path / "profile.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ValueError, match=message):
        load_profile(path)


def test_an_edited_or_cut_profile_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    write_profile(path, made_profile())
    text = path.read_text()
    path.write_text(text.replace('"bandwidth": 1000000000.0', '"bandwidth": 2000000000.0'))
    with pytest.raises(ValueError, match="has been edited"):
        load_profile(path)
    path.write_text(text[: len(text) // 2])
    with pytest.raises(ValueError, match="is not a readable profile"):
        load_profile(path)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match="is not a readable profile"):
        load_profile(path)


def test_a_profile_of_what_cannot_be_is_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though its checksum is right."""
    path, profile = tmp_path / "profile.json", made_profile()
    for part, value, message in [
        ("bandwidth", 0.0, "reads and computes"),
        ("rate", "fast", "rate"),
        ("passes", [], "forwards of one token"),
        ("target", {"name": "tiny"}, "weights_sha256"),
        ("more", 1, "more"),
    ]:
        with monkeypatch.context() as patch:
            patch.setattr("specbench.profile.asdict", lambda one, p=part, v=value: _with(one, p, v))
            write_profile(path, profile)
        with pytest.raises(ValueError, match=f"is a damaged profile: .*{message}"):
            load_profile(path)


def _with(profile: Any, part: str, value: Any) -> dict[str, Any]:
    from dataclasses import asdict

    return asdict(profile) | {part: value}


def test_a_grid_with_a_gap_or_a_doublet_is_refused() -> None:
    steps, passes = made_steps(), made_passes()
    with pytest.raises(AssertionError, match="full grid, with depth 0"):
        made_profile(steps={"echo": steps[1:]})
    with pytest.raises(AssertionError, match="no forward comes twice"):
        made_profile(passes=[*passes, passes[0]])


def test_a_step_table_has_medians_by_rows_and_depth() -> None:
    table = step_table(made_steps())
    assert table.rows == [1, 2, 4] and table.nodes == [0, 1, 3]
    assert table.step_s([0]) == 1.25
    assert table.step_s([3]) == 1.5 + 4 + 0.25
    assert table.step_s([2]) == pytest.approx((2.75 + 5.75) / 2)
    assert table.step_s([1, 1, 1]) == pytest.approx((0.5 + 0.25 + 3 + 0.5 + 0.25 + 5) / 2)
    drafts = step_table(made_steps(), lambda one: one.draft_s)
    assert drafts.step_s([1, 3]) == 1.0


def notes(**parts: Any) -> str:
    """What the page says below its tables."""
    return "\n".join(one.text for one in page(made_profile(**parts)) if isinstance(one, Note))


def test_why_a_method_is_not_in_the_table_of_chances_is_said() -> None:
    steps = {
        "tree": made_steps(nodes=2),
        "silent": made_steps(),
        "vanilla": made_steps(depths=(0,)),
    }
    shown = notes(steps=steps, samples={"tree": [[Sample((), 0)]] * 2})
    assert "tree is not in the table of chances: it drafts trees" in shown
    assert "silent is not in the table of chances: no draft with chances" in shown
    assert "vanilla" not in shown


def test_where_nothing_was_fitted_or_it_did_not_help_is_said() -> None:
    shown = notes(samples={"echo": [[Sample((0.9,), 1)] * 9] * 2})
    assert "echo: no temperature is fitted from depth 1 on, where there are 9 drafts" in shown
    fitted = [[Sample((0.9,), 0)] * 99, [Sample((0.9,), 1)] * 99]
    assert "echo: calibration did not help on the held-out texts at depth 1" in notes(
        samples={"echo": fitted}
    )
    assert "did not help" not in notes(samples={"echo": [fitted[0]] * 2})
