"""Rows to prompts: sources, keys, template, length filter, and the message of everything that can be wrong."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from fastgrpo.config import ArithmeticConfig, DataConfig, ModelConfig, Truncation
from fastgrpo.data import PromptSet, find_file, load_prompts, load_tokenizer, prompts_from_python
from fastgrpo.errors import UserError
from fastgrpo.paths import config_dir

REPO = Path(__file__).resolve().parents[2]
DATA = Path(os.environ.get("FASTGRPO_TEST_DATA", REPO.parent / "shared" / "data"))
MODEL = Path(os.environ.get("FASTGRPO_TEST_MODEL", ""))
WORDS = ["<unk>", "<s>", "<user>", "<end>", "<bot>", "hi", "there", "sys", "more", "=", "7", "w", "bye"]
# Adds four tokens to one message: <s> <user> ... <end> <bot>.
TEMPLATE = "{{ bos_token }}{% for m in messages %}<user> {{ m['content'] }} <end> {% endfor %}<bot>"


def toy_tokenizer(template: str | None = TEMPLATE, adds_bos: bool = True) -> PreTrainedTokenizerFast:
    """One token a word, id = place in WORDS; BOS is 1 and added to plain text when `adds_bos`."""
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # type: ignore[assignment]
    if adds_bos:
        backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])  # type: ignore[assignment]
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", unk_token="<unk>")
    tokenizer.chat_template = template
    return tokenizer


def write_lines(file: Path, rows: list[dict[str, Any]]) -> str:
    file.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return str(file)


def load(file: str | list[str], tokenizer: Any = None, split: Any = "train", **options: Any) -> PromptSet:
    files = [file] if isinstance(file, str) else file
    data = DataConfig(**{f"{split}_files": files}, **options)
    return load_prompts(data, tokenizer or toy_tokenizer(), split=split, seed=0)


def refusal(*args: Any, **options: Any) -> str:
    with pytest.raises(UserError) as caught:
        load(*args, **options)
    return str(caught.value)


# ---------------------------------------------------------------------------------------------------------- rows


def test_row_becomes_prompt_with_reference_and_its_columns(tmp_path: Path) -> None:
    rows = [{"prompt": "hi there", "reference": 7, "level": 2, "tags": ["a"]}, {"prompt": "hi", "reference": None}]
    prompts = load(write_lines(tmp_path / "toy.jsonl", rows)).prompts
    assert prompts[0].uid == "toy/train/0"
    assert prompts[0].ids == (1, 2, 5, 6, 3, 4)
    assert all(type(token) is int for token in prompts[0].ids)
    assert (prompts[0].text, prompts[0].reference, prompts[0].meta) == ("hi there", "7", rows[0])
    assert (prompts[1].uid, prompts[1].ids, prompts[1].reference) == ("toy/train/1", (1, 2, 5, 3, 4), None)


@pytest.mark.parametrize("wrap", [lambda rows: rows, lambda rows: {"version": 1, "data": rows}])
def test_json_list_and_data_object_are_the_same(tmp_path: Path, wrap: Any) -> None:
    file = tmp_path / "toy.json"
    file.write_text(json.dumps(wrap([{"q": "hi", "a": [1, 2]}])), encoding="utf-8-sig")
    prompt = load(str(file), prompt_key="q", reference_key="a").prompts[0]
    assert (prompt.ids, prompt.reference) == ((1, 2, 5, 3, 4), "[1, 2]")


def verl_rows(as_text: bool) -> list[dict[str, Any]]:
    nested = json.dumps if as_text else (lambda value: value)
    return [
        {
            "data_source": "toy",
            "prompt": [{"role": "system", "content": "sys"}, {"role": "user", "content": "hi"}],
            "reward_model": nested({"style": "rule", "ground_truth": str(7 + i)}),
            "extra_info": {"split": "train", "index": i},
        }
        for i in range(3)
    ]


@pytest.mark.parametrize("as_text", [False, True])
def test_verl_parquet(tmp_path: Path, as_text: bool) -> None:
    rows = verl_rows(as_text)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "train.parquet")
    loaded = load(str(tmp_path / "train.parquet"), reference_key="reward_model.ground_truth", split="val")
    assert [p.reference for p in loaded.prompts] == ["7", "8", "9"]
    assert [p.uid for p in loaded.prompts] == ["train/val/0", "train/val/1", "train/val/2"]
    assert loaded.prompts[0].ids == (1, 2, 7, 3, 2, 5, 3, 4)
    assert loaded.prompts[0].text == "hi"
    assert loaded.prompts[1].meta == rows[1]


def test_column_with_a_dot_in_its_name_wins_over_nesting(tmp_path: Path) -> None:
    file = write_lines(tmp_path / "a.jsonl", [{"prompt": "hi", "x.y": "flat", "x": {"y": "nested"}}])
    assert load(file, reference_key="x.y").prompts[0].reference == "flat"


def test_null_reference_key_asks_for_no_column(tmp_path: Path) -> None:
    prompt = load(write_lines(tmp_path / "a.jsonl", [{"prompt": "hi", "answer": "7"}]), reference_key=None).prompts[0]
    assert (prompt.reference, prompt.meta) == (None, {"prompt": "hi", "answer": "7"})


def test_two_files_of_one_name_have_distinct_uids_and_max_samples_takes_the_first(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    rows = [{"prompt": "hi", "reference": str(i)} for i in range(3)]
    files = [write_lines(tmp_path / "a.jsonl", rows), write_lines(tmp_path / "b" / "a.jsonl", rows)]
    loaded = load(files, train_max_samples=4)
    assert [p.uid for p in loaded.prompts] == ["a/train/0", "a/train/1", "a/train/2", "a-2/train/0"]
    assert "3 rows" in loaded.source and "the first 4 taken" in loaded.source


def test_messages_null_fields_of_parquet_structs_are_left_out(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "hi", "name": "w"}, {"role": "user", "content": "there"}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([{"prompt": messages}]), tmp_path / "a.parquet")
    template = "{% for m in messages %}{{ m['content'] }}{{ ' more' if 'name' in m else '' }} {% endfor %}"
    loaded = load(str(tmp_path / "a.parquet"), toy_tokenizer(template), reference_key=None)
    assert loaded.prompts[0].ids == (5, 8, 6)


# ------------------------------------------------------------------------------------------------------ messages


def test_system_prompt_comes_first_unless_the_row_has_one_and_suffix_goes_to_the_last_user(tmp_path: Path) -> None:
    own = [{"role": "system", "content": "w"}, {"role": "user", "content": "hi"}]
    turns = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "w"},
        {"role": "user", "content": "there"},
    ]
    file = write_lines(tmp_path / "a.jsonl", [{"prompt": p} for p in ("hi", own, turns)])
    loaded = load(file, reference_key=None, system_prompt="sys", prompt_suffix=" =")
    assert [p.ids for p in loaded.prompts] == [
        (1, 2, 7, 3, 2, 5, 9, 3, 4),
        (1, 2, 11, 3, 2, 5, 9, 3, 4),
        (1, 2, 7, 3, 2, 5, 3, 2, 11, 3, 2, 6, 9, 3, 4),
    ]
    assert [p.text for p in loaded.prompts] == ["hi =", "hi =", "there ="]


def test_empty_system_prompt_is_an_empty_system_message(tmp_path: Path) -> None:
    template = (
        "{% if messages[0]['role'] != 'system' %}more {% endif %}{% for m in messages %}{{ m['content'] }} {% endfor %}"
    )
    file = write_lines(tmp_path / "a.jsonl", [{"prompt": "hi"}])
    tokenizer = toy_tokenizer(template)
    assert load(file, tokenizer, reference_key=None).prompts[0].ids == (8, 5)
    assert load(file, tokenizer, reference_key=None, system_prompt="").prompts[0].ids == (5,)


def test_template_kwargs_reach_the_template_and_generation_prompt_is_on(tmp_path: Path) -> None:
    template = (
        "{{ messages[0]['content'] }}{% if thinking %} more{% endif %}{% if add_generation_prompt %} <bot>{% endif %}"
    )
    file = write_lines(tmp_path / "a.jsonl", [{"prompt": "hi"}])
    tokenizer = toy_tokenizer(template)
    assert load(file, tokenizer, reference_key=None).prompts[0].ids == (5, 4)
    kwargs = {"thinking": True}
    assert load(file, tokenizer, reference_key=None, apply_chat_template_kwargs=kwargs).prompts[0].ids == (5, 8, 4)
    reserved = refusal(file, tokenizer, reference_key=None, apply_chat_template_kwargs={"tokenize": False})
    assert "apply_chat_template_kwargs: tokenize cannot be set" in reserved


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "a.jsonl row 0: the prompt in `prompt` is empty"),
        ([], "the prompt in `prompt` is empty"),
        (3, "a prompt is a string or a list of {role, content}, not int"),
        ([{"content": "hi"}], "a message is {role, content}, not"),
        ([{"role": "user", "content": [{"type": "image"}]}], "a message's content is text, not"),
        ([{"role": "user", "content": "hi"}, {"role": "assistant", "content": "7"}], "last message is the assistant's"),
    ],
)
def test_bad_prompts_are_named(tmp_path: Path, prompt: Any, message: str) -> None:
    assert message in refusal(write_lines(tmp_path / "a.jsonl", [{"prompt": prompt, "reference": "7"}]))


def test_suffix_without_user_message_is_refused(tmp_path: Path) -> None:
    file = write_lines(tmp_path / "a.jsonl", [{"prompt": [{"role": "system", "content": "hi"}], "reference": "7"}])
    assert "no user message to append data.prompt_suffix=' ='" in refusal(file, prompt_suffix=" =")


def test_template_that_refuses_a_row_is_an_error_with_that_row(tmp_path: Path) -> None:
    template = "{{ raise_exception('no system') if messages[0]['role'] == 'system' else messages[0]['content'] }}"
    rows = [{"prompt": "hi"}] * 2 + [
        {"prompt": [{"role": "system", "content": "w"}, {"role": "user", "content": "hi"}]}
    ]
    said = refusal(write_lines(tmp_path / "a.jsonl", rows), toy_tokenizer(template), reference_key=None)
    assert "a.jsonl row 2: the chat template refuses it: TemplateError: no system" in said


# ------------------------------------------------------------------------------------------------- B27: one BOS


def test_one_bos_when_template_and_tokenizer_both_write_it(tmp_path: Path) -> None:
    tokenizer = toy_tokenizer(TEMPLATE, adds_bos=True)
    assert tokenizer("hi")["input_ids"] == [1, 5]  # it does add its own to plain text
    ids = load(write_lines(tmp_path / "a.jsonl", [{"prompt": "hi"}]), tokenizer, reference_key=None).prompts[0].ids
    assert ids == (1, 2, 5, 3, 4) and ids.count(1) == 1


def test_template_without_bos_is_followed_though_the_tokenizer_adds_one(tmp_path: Path) -> None:
    tokenizer = toy_tokenizer("<user> {{ messages[0]['content'] }} <bot>", adds_bos=True)
    ids = load(write_lines(tmp_path / "a.jsonl", [{"prompt": "hi"}]), tokenizer, reference_key=None).prompts[0].ids
    assert ids == (2, 5, 4)


@pytest.mark.parametrize(("adds_bos", "expected"), [(True, (1, 7, 5, 9)), (False, (7, 5, 9))])
def test_plain_template_joins_contents_with_bos_as_the_tokenizer_does(
    tmp_path: Path, adds_bos: bool, expected: tuple[int, ...]
) -> None:
    toy_tokenizer(None, adds_bos).save_pretrained(tmp_path / "model")
    tokenizer = load_tokenizer(ModelConfig(chat_template="plain"), tmp_path / "model")
    file = write_lines(tmp_path / "a.jsonl", [{"prompt": "hi ="}])
    assert load(file, tokenizer, reference_key=None, system_prompt="sys").prompts[0].ids == expected
    messages = [{"role": "system", "content": "sys"}, {"role": "user", "content": "hi ="}]
    assert tokenizer.apply_chat_template(messages, tokenize=False) == "<s>" * adds_bos + "sys\nhi ="


# -------------------------------------------------------------------------------------------------- load_tokenizer


def test_tokenizer_without_template_asks_for_one_and_takes_a_file(tmp_path: Path) -> None:
    toy_tokenizer(None).save_pretrained(tmp_path / "model")
    with pytest.raises(UserError, match=r"no chat template.*model\.chat_template=plain.*Jinja file"):
        load_tokenizer(ModelConfig(), tmp_path / "model")
    (tmp_path / "t.jinja").write_text("w {{ messages[0]['content'] }}")
    tokenizer = load_tokenizer(ModelConfig(chat_template=str(tmp_path / "t.jinja")), tmp_path / "model")
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], return_dict=False) == [11, 5]
    with pytest.raises(UserError, match=r"model\.chat_template: there is no file .*missing\.jinja"):
        load_tokenizer(ModelConfig(chat_template="missing.jinja"), tmp_path / "model")


def test_own_template_of_the_tokenizer_folder_is_used_and_an_empty_folder_is_refused(tmp_path: Path) -> None:
    toy_tokenizer().save_pretrained(tmp_path / "tok")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"model_type": "llama"}')
    tokenizer = load_tokenizer(ModelConfig(tokenizer_path=str(tmp_path / "tok")), tmp_path / "model")
    assert tokenizer.chat_template == TEMPLATE
    with pytest.raises(UserError, match=r"no tokenizer can be loaded from .*model .*set model\.tokenizer_path"):
        load_tokenizer(ModelConfig(), tmp_path / "model")


# ---------------------------------------------------------------------------------------------- B22: length filter


def three_lengths(tmp_path: Path) -> str:
    """Prompts of 5, 12 and 13 tokens after the template; the last has 9 before it."""
    rows = [{"prompt": " ".join(["w"] * count), "reference": str(count)} for count in (1, 8, 9)]
    return write_lines(tmp_path / "b22.jsonl", rows)


def test_overlong_prompts_are_dropped_by_their_templated_length_and_counted(tmp_path: Path) -> None:
    loaded = load(three_lengths(tmp_path), max_prompt_length=12)
    assert [len(p.ids) for p in loaded.prompts] == [5, 12]
    assert [p.uid for p in loaded.prompts] == ["b22/train/0", "b22/train/1"]
    assert loaded.dropped == 1


def test_uids_do_not_move_when_an_earlier_prompt_is_dropped(tmp_path: Path) -> None:
    rows = [{"prompt": "w w w w"}, {"prompt": "hi"}]
    loaded = load(write_lines(tmp_path / "a.jsonl", rows), reference_key=None, max_prompt_length=6)
    assert [p.uid for p in loaded.prompts] == ["a/train/1"]


@pytest.mark.parametrize(("side", "expected"), [("left", (11,) * 9 + (3, 4)), ("right", (1, 2) + (11,) * 9)])
def test_truncation_keeps_one_end(tmp_path: Path, side: str, expected: tuple[int, ...]) -> None:
    loaded = load(
        three_lengths(tmp_path), max_prompt_length=11, filter_overlong_prompts=False, truncation=Truncation[side]
    )
    assert [len(p.ids) for p in loaded.prompts] == [5, 11, 11]
    assert loaded.prompts[2].ids == expected
    assert loaded.dropped == 0


def test_truncation_error_names_row_length_and_ways_out(tmp_path: Path) -> None:
    said = refusal(three_lengths(tmp_path), max_prompt_length=12, filter_overlong_prompts=False)
    for part in (
        "b22.jsonl row 2",
        "13 tokens",
        "data.max_prompt_length=12",
        "filter_overlong_prompts",
        "truncation=left",
    ):
        assert part in said


def test_all_dropped_is_an_error_with_the_shortest(tmp_path: Path) -> None:
    said = refusal(three_lengths(tmp_path), max_prompt_length=4)
    assert "all 3 prompts" in said and "data.max_prompt_length=4" in said and "the shortest has 5" in said


# --------------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b'{"prompt": "hi"}\n\n{"prompt": \n', r"a\.jsonl line 3 is not JSON: Expecting value at column 12"),
        ("a.jsonl", b'{"prompt": "hi"}\n[1]\n', r"a\.jsonl row 1 is list '\[1\]', not an object"),
        ("a.jsonl", b"\n", r"data\.train_files: .*a\.jsonl is empty"),
        ("a.json", b"", r"a\.json is empty"),
        ("a.json", b"[]", r"a\.json is empty"),
        ("a.json", b'[{"prompt": 1},\n]', r"a\.json is not JSON: .* at line 2 column 1"),
        ("a.json", b'{"prompt": 1}\n{"prompt": 2}', r"one JSON object a line is a \.jsonl file"),
        ("a.json", b'{"rows": []}', r"must be a list of rows .* it is an object with the keys rows"),
        ("a.jsonl", '{"prompt": "你好"}'.encode("gbk"), r"a\.jsonl is not UTF-8"),
        ("a.parquet", b"PAR1 no", r"a\.parquet is no readable parquet file"),
        ("a.csv", b"prompt\nhi\n", r"a\.csv is none of \.jsonl, \.json, \.parquet"),
    ],
)
def test_broken_files_are_named(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message):
        load(str(tmp_path / name))


def test_empty_parquet_is_refused(tmp_path: Path) -> None:
    pyarrow.parquet.write_table(pyarrow.table({"prompt": pyarrow.array([], pyarrow.string())}), tmp_path / "a.parquet")
    assert "a.parquet is empty, it has no rows" in refusal(str(tmp_path / "a.parquet"))


def test_missing_column_names_file_key_columns_and_option(tmp_path: Path) -> None:
    rows = [{"question": "hi", "reward_model": {"style": "rule", "ground_truth": "7"}, "note": "{x"}]
    file = write_lines(tmp_path / "a.jsonl", rows)
    said = refusal(file)
    there = "the columns there are question, reward_model.style, reward_model.ground_truth, note"
    assert f"a.jsonl row 0: no column `prompt`; {there}: set data.prompt_key to one of them" in said
    said = refusal(file, prompt_key="question")
    assert f"no column `reference`; {there}: set data.reference_key to one of them (or null: no references)" in said
    assert "no column `reward_model.truth`" in refusal(file, prompt_key="question", reference_key="reward_model.truth")
    assert "no column `note.x`" in refusal(file, prompt_key="question", reference_key="note.x")


def test_a_row_that_lacks_what_others_have(tmp_path: Path) -> None:
    rows = [{"prompt": "hi", "reference": "7"}] * 3 + [{"promt": "hi", "reference": "7"}]
    said = refusal(write_lines(tmp_path / "a.jsonl", rows))
    assert "a.jsonl row 3: no column `prompt` (data.prompt_key), which 3 of the 4 rows have; the columns there" in said
    assert said.endswith("are promt, reference: complete the row, or leave it out")


def test_missing_files_say_where_they_were_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    said = refusal("nowhere/a.jsonl")
    assert "data.train_files: there is no file nowhere/a.jsonl (looked for" in said
    assert str(tmp_path / "nowhere" / "a.jsonl") in said and str(config_dir() / "nowhere" / "a.jsonl") in said
    assert "there is no file ./mydata" in refusal("./mydata")  # looks local: the hub is not asked
    (tmp_path / "folder").mkdir()
    assert "data.val_files: folder is a folder: name the file in it" in refusal("folder", split="val")


def test_no_train_files_and_no_samples_are_refused_and_no_val_files_are_an_empty_set(tmp_path: Path) -> None:
    assert "data.train_files is empty" in refusal([])
    assert load([], split="val").prompts == ()
    file = write_lines(tmp_path / "a.jsonl", [{"prompt": "hi", "reference": "7"}])
    assert "data.val_max_samples=0 leaves no prompt" in refusal(file, split="val", val_max_samples=0)


# ------------------------------------------------------------------------------------- python, arithmetic, digest


def test_prompts_from_python() -> None:
    data = DataConfig(prompt_key="q", reference_key="a.b", max_prompt_length=8)
    given = ["hi", [{"role": "user", "content": "there"}], {"q": "hi", "a": {"b": 7}, "level": 1}, "w w w w w"]
    loaded = prompts_from_python(given, toy_tokenizer(), data)
    assert [(p.uid, p.ids, p.reference) for p in loaded.prompts] == [
        ("python/train/0", (1, 2, 5, 3, 4), None),
        ("python/train/1", (1, 2, 6, 3, 4), None),
        ("python/train/2", (1, 2, 5, 3, 4), "7"),
    ]
    assert loaded.dropped == 1 and loaded.prompts[2].meta == given[2]
    with pytest.raises(UserError, match="prompts=\\[\\] holds no prompts"):
        prompts_from_python([], toy_tokenizer(), data)
    with pytest.raises(UserError, match=r"prompts='hello' is one prompt: put it into a list, prompts=\[\.\.\.\]"):
        prompts_from_python("hello", toy_tokenizer(), data)
    with pytest.raises(UserError, match="is one prompt"):
        prompts_from_python({"q": "hi"}, toy_tokenizer(), data)  # pyright: ignore[reportArgumentType]
    said = r"prompts row 1: no column `q` \(data.prompt_key\), which 1 of the 2 rows have; the columns there"
    with pytest.raises(UserError, match=said):
        prompts_from_python(["hi", {"prompt": "hi"}], toy_tokenizer(), data)


def test_arithmetic_flows_through_the_template_whatever_the_keys(tmp_path: Path) -> None:
    made = ArithmeticConfig(max_value=9, train_size=5, val_size=3)
    loaded = load("arithmetic", prompt_key="q", reference_key=None, arithmetic=made, prompt_suffix=" hi")
    assert [p.uid for p in loaded.prompts] == [f"arithmetic/train/{i}" for i in range(5)]
    for prompt in loaded.prompts:
        left, _, right, equals, suffix = prompt.text.split()
        assert (equals, suffix, prompt.reference) == ("=", "hi", str(int(left) + int(right)))
        assert prompt.ids[0] == 1 and prompt.ids[-4:] == (9, 5, 3, 4)


def test_fingerprint_tells_apart_what_differs(tmp_path: Path) -> None:
    rows = [{"prompt": "hi", "reference": "7"}, {"prompt": "there", "reference": "8"}]
    base = load(write_lines(tmp_path / "a.jsonl", rows))
    assert base.fingerprint == load(str(tmp_path / "a.jsonl")).fingerprint and len(base.fingerprint) == 32
    others = [
        load(str(tmp_path / "a.jsonl"), system_prompt="sys"),
        load(str(tmp_path / "a.jsonl"), train_max_samples=1),
        load(write_lines(tmp_path / "a.jsonl", [rows[0], {**rows[1], "reference": "9"}])),
        load(write_lines(tmp_path / "a.jsonl", rows[::-1])),
    ]
    assert len({base.fingerprint, *(other.fingerprint for other in others)}) == 5


# ---------------------------------------------------------------------------------------------- shipped and real data


def test_find_file_prefers_the_working_directory_then_the_shipped_configs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert find_file("data/rules_zh.jsonl") == config_dir() / "data" / "rules_zh.jsonl"
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "rules_zh.jsonl").write_text("")
    assert find_file("data/rules_zh.jsonl") == tmp_path / "data" / "rules_zh.jsonl"
    assert find_file(str(tmp_path / "data" / "rules_zh.jsonl")) == tmp_path / "data" / "rules_zh.jsonl"


def test_config_dir_is_inside_the_package_when_installed(tmp_path: Path) -> None:
    package = tmp_path / "fastgrpo"
    package.mkdir()
    (package / "__init__.py").write_text("")
    for name in ("paths.py", "errors.py"):
        (package / name).write_text((REPO / "fastgrpo" / name).read_text())
    show = "import fastgrpo.paths; print(fastgrpo.paths.config_dir())"

    def shown() -> str:
        return subprocess.run([sys.executable, "-c", show], cwd=tmp_path, capture_output=True, text=True).stdout.strip()

    assert shown() == str(tmp_path.resolve() / "configs")
    (package / "configs").mkdir()
    assert shown() == str(package.resolve() / "configs")


def test_shipped_chinese_prompts_are_many_distinct_and_chinese() -> None:
    train, val = (
        [json.loads(line) for line in find_file(f"data/{name}.jsonl").read_text(encoding="utf-8").splitlines()]
        for name in ("rules_zh", "rules_zh_val")
    )
    assert len(train) >= 220 and len(val) == 32
    texts = [row["prompt"] for row in train + val]
    assert all(set(row) == {"prompt"} for row in train + val) and len(set(texts)) == len(texts)
    assert all(sum("一" <= sign <= "鿿" for sign in text) >= 5 for text in texts)


@pytest.mark.skipif(not (DATA / "gsm8k" / "train.jsonl").exists(), reason="no GSM8K files")
def test_gsm8k_files() -> None:
    keys = {"prompt_key": "question", "reference_key": "answer", "max_prompt_length": 10_000}
    train = load(str(DATA / "gsm8k" / "train.jsonl"), **keys)
    assert len(train) == 7473 and train.prompts[0].text.startswith("Natalia sold clips")
    assert train.prompts[17].uid == "train/train/17" and str(train.prompts[0].reference).endswith("#### 72")
    assert len(load(str(DATA / "gsm8k" / "test.jsonl"), split="val", **keys)) == 1319


@pytest.mark.skipif(not (MODEL / "tokenizer.json").exists(), reason="FASTGRPO_TEST_MODEL names no model folder")
def test_smollm2_ids_are_those_of_its_rendered_template(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(ModelConfig(), MODEL)
    file = write_lines(tmp_path / "a.jsonl", [{"prompt": "12 + 30 ="}, {"prompt": "你好，“world”"}])
    default = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
    for system_prompt, shown in ((None, default), ("", ""), ("Be brief.", "Be brief.")):
        for prompt in load(file, tokenizer, reference_key=None, system_prompt=system_prompt).prompts:
            turns = f"<|im_start|>system\n{shown}<|im_end|>\n<|im_start|>user\n{prompt.text}<|im_end|>\n"
            text = turns + "<|im_start|>assistant\n"
            assert list(prompt.ids) == tokenizer(text)["input_ids"]
