"""Finding and loading methods, own and installed ones, and their knobs."""

from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import pytest

import specbench_methods
from specbench import registry
from specbench.cli import build_parser
from specbench.commands.run import plan_for
from specbench.config import RunConfig
from specbench.conformance.decoding import make_request, reference
from specbench.conformance.models import looping_target
from specbench.method import Batch, Budget, Method, MethodConfig, Proposal
from specbench.registry import load_method, make_config, sources
from specbench.target import DEFAULT_TARGET, Target
from tests.drafters import decode

METHOD = """
from specbench.method import Method, MethodConfig, Proposal

class Idle(Method):
    '''Drafts nothing.'''
    def propose(self, batch, budgets):
        return Proposal.nothing(batch.rows)
"""


@cache
def target() -> Target:
    return looping_target()


def install(folder: Path, points: str, name: str = "extra", **modules: str) -> None:
    """Makes an installed distribution with entry points in a folder."""
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[specbench.methods]\n{points}\n")
    for module, text in modules.items():
        (folder / f"{module}.py").write_text(text)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder on the path that packages are looked for in."""
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder whose files count as files of methods/."""
    path = [*specbench_methods.__path__, str(tmp_path)]
    monkeypatch.setattr(specbench_methods, "__path__", path)
    return tmp_path


# Finding and loading.


def test_every_file_of_the_methods_folder_is_a_method_of_its_name() -> None:
    folder = Path(registry.__file__).parents[1] / "methods"
    files = {path.stem for path in folder.glob("*.py") if not path.stem.startswith("_")}
    own = {name for name, source in sources().items() if source.origin == "specbench"}
    assert own == files >= {"vanilla", "ngram", "draft_model", "early_exit"}
    assert next(iter(sources())) == "vanilla"


def test_a_method_of_an_installed_package_is_listed_loaded_and_run(site: Path) -> None:
    install(site, "idle = idle_drafter:Idle", idle_drafter=METHOD)
    assert sources()["idle"].origin == "extra"
    cls = load_method("idle")
    method = cls(target(), make_config("idle", cls, {"depth": "2"}))
    (row,) = decode(target(), method, [make_request((5, 6, 7))])
    assert row.output == reference(target(), row.request)


def test_an_entry_point_may_name_a_module_with_one_method(site: Path) -> None:
    install(site, "idle = lone_drafter", lone_drafter=METHOD)
    assert load_method("idle").__name__ == "Idle"


def test_a_file_in_the_methods_folder_is_enough(own: Path) -> None:
    (own / "dropped_in.py").write_text(METHOD)
    (own / "_helper.py").write_text("raise RuntimeError('not a method')")
    assert sources()["dropped_in"].origin == "specbench"
    assert "_helper" not in sources()
    assert load_method("dropped_in").__name__ == "Idle"


def test_a_missing_dependency_breaks_one_method_and_says_what_to_install(own: Path) -> None:
    (own / "needy.py").write_text("import no_such_package.heads\n" + METHOD)
    assert "needy" in sources()
    with pytest.raises(
        ValueError, match=r"'needy' cannot be loaded: .*; install 'no_such_package'"
    ):
        load_method("needy")
    assert {name for name in sources() if name != "needy" and load_method(name)} >= {"ngram"}


def test_where_no_methods_are_asked_for_one_that_cannot_be_loaded_is_left_out(own: Path) -> None:
    before, lacking = registry.usable(DEFAULT_TARGET, {})
    (own / "needy.py").write_text("import no_such_package\n" + METHOD)
    names, problems = registry.usable(DEFAULT_TARGET, {})
    assert names == before and "needy" in sources()
    (problem,) = set(problems) - set(lacking)
    assert "needy" in problem and "install 'no_such_package'" in problem
    todo = plan_for(
        build_parser().parse_args(["run", "--workloads", "humaneval", "--prompts", "1"])
    )
    assert todo.config.methods == names
    assert todo.notes == [f"left out: {problem}" for problem in problems]


def test_a_method_that_lacks_something_for_a_target_is_left_out_or_named(
    own: Path, tmp_path: Path
) -> None:
    lacking = (
        METHOD
        + """
    @classmethod
    def lacks(cls, config, target):
        return "" if target == "fed" else f"idle has no food for {target}"
"""
    )
    (own / "hungry.py").write_text(lacking)
    assert "hungry" in registry.usable("fed", {})[0]
    names, problems = registry.usable("other", {})
    assert "hungry" not in names and "idle has no food for other" in problems
    assert "hungry" in RunConfig(target="fed", methods=("hungry",)).methods
    with pytest.raises(ValueError, match="idle has no food for other"):
        RunConfig(target="other", methods=("hungry",))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("from specbench.method import Nothing", "cannot be loaded: cannot import name 'Nothing'"),
        ("import specbench.nothing", "cannot be loaded: No module named 'specbench.nothing'"),
        ("raise ImportError('pip install heads')", "cannot be loaded: pip install heads"),
        ("1 / 0", "is broken: ZeroDivisionError: division by zero"),
        ("raise SystemExit(3)", "is broken: SystemExit: 3"),
        ("def propose(:", "is broken: SyntaxError"),
        ("", "is broken: specbench_methods.{name} defines 0 methods; valid: exactly one"),
        (METHOD + METHOD.replace("Idle", "Lazy"), "defines 2 methods; valid: exactly one"),
        ("from specbench_methods.ngram import Ngram", "defines 0 methods"),
        (METHOD.replace("propose", "suggest"), "defines 0 methods"),
    ],
)
def test_a_broken_module_is_named_with_what_is_wrong(text: str, message: str, own: Path) -> None:
    name = own.name
    (own / f"{name}.py").write_text(text)
    with pytest.raises(ValueError) as raised:
        load_method(name)
    assert f"method {name!r}" in str(raised.value)
    assert message.format(name=name) in str(raised.value)
    assert "; install" not in str(raised.value)


@pytest.mark.parametrize("attribute", ["Missing", "Method", "Proposal"])
def test_an_entry_point_must_name_a_method(attribute: str, site: Path) -> None:
    install(site, f"odd = odd_drafter:{attribute}", odd_drafter=METHOD)
    with pytest.raises(ValueError, match=f"'odd' is broken: odd_drafter:{attribute} defines 0"):
        load_method("odd")


def test_an_entry_point_without_its_module_is_named(site: Path) -> None:
    install(site, "ghost = ghost_drafter:Ghost")
    with pytest.raises(
        ValueError, match=r"'ghost' cannot be loaded: No module named 'ghost_drafter'"
    ):
        load_method("ghost")


def test_two_methods_of_one_name_are_refused_by_the_names_of_their_packages(site: Path) -> None:
    install(site, "ngram = idle_drafter:Idle")
    with pytest.raises(ValueError, match="'ngram' of extra has the name of a method of specbench"):
        sources()


def test_an_unknown_name_gets_a_hint_and_the_list() -> None:
    with pytest.raises(ValueError, match=r"unknown method 'ngrams' \(did you mean 'ngram'\?\)"):
        load_method("ngrams")
    with pytest.raises(ValueError, match=r"unknown method 'xyz'; valid: vanilla, draft_model, "):
        load_method("xyz")


# Knobs.


@dataclass(frozen=True, kw_only=True)
class KnobbyConfig(MethodConfig):
    flag: bool = False
    width: int = 3
    scale: float = 0.5
    path: str = "here"
    levels: tuple[int, ...] = field(default_factory=lambda: (1, 2))

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.width > 9:
            raise ValueError(f"width {self.width} is out of range; valid: at most 9")


class Knobby(Method):
    Config = KnobbyConfig

    def propose(self, batch: Batch, budgets: list[Budget]) -> Proposal:  # type: ignore[override]
        return Proposal.nothing(batch.rows)


@pytest.mark.parametrize(
    ("knob", "text", "value"),
    [
        ("flag", "true", True),
        ("flag", "False", False),
        ("flag", "1", True),
        ("flag", "0", False),
        ("width", "-7", -7),
        ("depth", "9", 9),
        ("scale", "2", 2.0),
        ("scale", "1e-3", 0.001),
        ("path", "a/b=c, d", "a/b=c, d"),
        ("path", "", ""),
        ("levels", "4,5,6", (4, 5, 6)),
        ("levels", "4", (4,)),
        ("levels", "", ()),
    ],
)
def test_a_knob_is_read_as_the_type_of_its_default(knob: str, text: str, value: object) -> None:
    found = getattr(make_config("knobby", Knobby, {knob: text}), knob)
    assert (found, type(found)) == (value, type(value))


@pytest.mark.parametrize(
    ("knob", "text", "valid"),
    [
        ("flag", "yes", "true or false"),
        ("flag", "", "true or false"),
        ("width", "3.5", "a whole number"),
        ("width", "", "a whole number"),
        ("scale", "large", "a number"),
        ("scale", "nan", "a number"),
        ("scale", "inf", "a number"),
        ("levels", "1,x", "1,2,3"),
        ("levels", "1,,2", "1,2,3"),
    ],
)
def test_a_knob_of_the_wrong_type_is_refused(knob: str, text: str, valid: str) -> None:
    with pytest.raises(ValueError, match=f"^knobby.{knob}: '{text}' is not valid; valid: {valid}$"):
        make_config("knobby", Knobby, {knob: text})


def test_a_knob_out_of_range_is_refused_in_the_methods_name() -> None:
    with pytest.raises(ValueError, match=r"^method 'knobby': width 10 is out of range; valid: at"):
        make_config("knobby", Knobby, {"width": "10"})


def test_an_unknown_knob_gets_a_hint_and_the_list() -> None:
    with pytest.raises(
        ValueError, match=r"'knobby' has no knob 'widht' \(did you mean 'width'\?\)"
    ):
        make_config("knobby", Knobby, {"widht": "1"})
    valid = "valid: depth, max_nodes, controller, flag, width, scale, path, levels"
    with pytest.raises(ValueError, match=f"no knob 'qqq'; {valid}"):
        make_config("knobby", Knobby, {"qqq": "1"})


def test_without_knobs_the_defaults_hold() -> None:
    assert make_config("knobby", Knobby, {}) == KnobbyConfig()


@pytest.mark.parametrize("knob", ["path: str", "path: str | None = None"])
def test_a_knob_that_could_not_be_set_breaks_its_method(knob: str, own: Path) -> None:
    name = own.name
    config = f"""
from dataclasses import dataclass

@dataclass(frozen=True, kw_only=True)
class Config(MethodConfig):
    {knob}
"""
    (own / f"{name}.py").write_text(
        METHOD.replace("class Idle", f"{config}\nclass Idle").replace(
            "    def", "    Config = Config\n    def"
        )
    )
    with pytest.raises(ValueError, match="is broken: knob 'path' has no default of a known type"):
        load_method(name)


def test_a_knob_of_a_config_without_its_decorator_is_named(own: Path) -> None:
    name = own.name
    config = "class Config(MethodConfig):\n    period: int = 2\n"
    (own / f"{name}.py").write_text(
        METHOD.replace("class Idle", f"{config}\n\nclass Idle").replace(
            "    def", "    Config = Config\n    def"
        )
    )
    with pytest.raises(ValueError, match=r"Config\.period is no field; decorate the class with"):
        load_method(name)
