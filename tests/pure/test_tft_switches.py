"""``MS_ENABLE_TFT``: what is accepted, the form it is handed on in, what is refused, and what MindSpore makes of it."""

import re
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pure.test_docs import rows
from resilient_train import config
from resilient_train.errors import ConfigError
from resilient_train.launch.cli.mindspore_view import differs
from resilient_train.tft_switches import (
    SWITCHES,
    AutoSave,
    Switches,
    auto_save,
    normal_form,
    parse_switches,
    snapshot_steps,
)

# -- what MindSpore 2.10 does, by its description in the docs


def by_words(text: str) -> set[str]:
    """Its Python code: ``"TTP:1" in text``, and ``"TRE:2"`` as well."""
    return {word.partition(":")[0] for word in [*(f"{key}:1" for key in (*SWITCHES, "ATO")), "TRE:2"] if word in text}


def at_import(text: str) -> dict[str, str]:
    """``import mindspore``: no braces at all, then commas, then colons. IndexError where there is none."""
    found = {}
    for item in text.strip().replace("{", "").replace("}", "").strip().split(","):
        if item != "":
            parts = item.split(":")
            found[parts[0].strip()] = parts[1].strip()
    return found


def getline(text: str, end: str) -> list[str]:
    """What a loop of C++'s getline gives: nothing behind an ``end`` that stands last."""
    return re.findall(f"[^{end}]*{end}|[^{end}]+$", text)


def in_cpp(text: str) -> dict[str, str]:
    """Its C++ code: braces and spaces off the ends, commas, colons. IndexError where it reads behind a vector's end."""
    found = {}
    inner = re.sub(r"^[\s{]+", "", text, flags=re.ASCII)
    inner = re.sub(r"[\s}]+\Z", "", inner, flags=re.ASCII)
    for item in getline(inner, ","):
        parts = [part.removesuffix(":").strip(" \t\r\n\f\v") for part in getline(item.removesuffix(","), ":")]
        found[parts[0]] = parts[1]
    return found


def for_ato(text: str) -> dict[str, str]:
    """How its callback finds ``ATO_PATH`` and ``ATO_THRESHOLD``: by the first colon of each item."""
    inner = text.strip()
    if inner.startswith("{") and inner.endswith("}"):
        inner = inner[1:-1]
    pairs = (item.split(":", 1) for item in inner.split(",") if ":" in item)
    return {key.strip(): value.strip() for key, value in pairs}


def on(values: Mapping[str, str]) -> set[str]:
    keys = {key for key in (*SWITCHES, "ATO") if values.get(key) == "1"}
    return keys | ({"TRE"} if values.get("TRE") == "2" else set())


def meant(switches: Switches) -> set[str]:
    return {key for key in SWITCHES if getattr(switches, key.lower())} | ({"ATO"} & on(switches.other))


def with_ttp(keys: set[str]) -> set[str]:
    """As its documents have it; in its code ``UCE`` and ``ARF`` stand wherever ``TTP`` does."""
    return keys | ({"TTP"} if keys & {"UCE", "ARF"} else set())


def agree(text: str, switches: Switches) -> bool:
    """Whether all of MindSpore reads these switches."""
    try:
        read = [by_words(text), on(at_import(text)), on(in_cpp(text))]
    except IndexError:
        return False
    return all(with_ttp(keys) == meant(switches) for keys in read)


def agree_where_asked(text: str, switches: Switches) -> bool:
    """The same, but of what two of the three read only what anything asks them for."""
    asked = (in_cpp, {"UCE", "HCCE", "ARF", "TRE", "RSC"}), (at_import, {"ARF"})
    try:
        heard = all(on(read(text)) & keys == meant(switches) & keys for read, keys in asked)
    except IndexError:
        return False
    return heard and with_ttp(by_words(text)) == meant(switches)


# -- accepted

ACCEPTED = {
    "{TTP:1,UCE:1,ARF:1}": "{TTP:1,UCE:1,ARF:1}",
    "{TTP:1, UCE:1}": "{TTP:1,UCE:1}",
    "{ TTP : 1 , UCE : 1 , ARF : 1 }": "{TTP:1,UCE:1,ARF:1}",
    "{ TRE : 1 }": "{TRE:1}",
    "{TRE :1}": "{TRE:1}",
    "{\tTSP:\t1\t}": "{TSP:1}",
    "{TTP:1,\n UCE:1}\n": "{TTP:1,UCE:1}",
    "{TTP:1,\r\nHCCE:1}": "{TTP:1,HCCE:1}",
    "TTP:1": "{TTP:1}",
    "TTP:1,UCE:1,ARF:1": "{TTP:1,UCE:1,ARF:1}",
    "{TTP:1": "{TTP:1}",
    "TTP:1}": "{TTP:1}",
    "{{TTP:1}}": "{TTP:1}",
    "{TTP:1,}": "{TTP:1}",
    "{TTP:1, }": "{TTP:1}",
    "{,TTP:1}": "{TTP:1}",
    "{TTP:1,,ARF:1}": "{TTP:1,ARF:1}",
    "{TTP:1, ,ARF:1}": "{TTP:1,ARF:1}",
    "{TTP:1 UCE:1}": "{TTP:1,UCE:1}",
    "TTP:1 UCE:1 ARF:1": "{TTP:1,UCE:1,ARF:1}",
    "'{TTP:1}'": "{TTP:1}",
    '"{TTP:1}"': "{TTP:1}",
    "{'TTP':1}": "{TTP:1}",
    "{'TTP': 1, 'UCE': 1,}": "{TTP:1,UCE:1}",
    '{"TTP":"1","ARF":"1"}': "{TTP:1,ARF:1}",
    "{'TTP:1','HCCE:1'}": "{TTP:1,HCCE:1}",
    "{ARF:1}": "{TTP:1,ARF:1}",
    "{UCE:1,HCCE:1}": "{TTP:1,UCE:1,HCCE:1}",
    "{TTP:0,ARF:1}": "{TTP:1,ARF:1}",
    "{TTP:1,UCE:0,TRE:0}": "{TTP:1}",
    "{RSC:1,TSP:1,TTP:1}": "{TTP:1,TSP:1,RSC:1}",
    "{TRE:2, TRE_SNAPSHOT_STEPS:007}": "{TRE:2,TRE_SNAPSHOT_STEPS:7}",
    "TRE_SNAPSHOT_STEPS:10 TRE:2": "{TRE:2,TRE_SNAPSHOT_STEPS:10}",
    "{ATO:1}": "{ATO:1}",
    "{ATO:1,ATO_PATH:'./x.json'}": "{ATO:1,ATO_PATH:./x.json}",
    "{ATO:1,ATO_PATH:0}": "{ATO:1,ATO_PATH:0}",
    "{ATO_THRESHOLD:12,ATO:1}": "{ATO:1,ATO_THRESHOLD:12}",
    "{ATO:1,ATO_PATH:/data/a:b.json}": "{ATO:1,ATO_PATH:/data/a:b.json}",
    "{TTP:1,ATO:0,ATO_PATH:/数据/x.json}": "{TTP:1,ATO_PATH:/数据/x.json}",
    "{TTP:0}": "{}",
    "{ }": "{}",
    "": "",
    "  ": "",
}
REFUSED = {
    "TTP": "'TTP' has no value; write TTP:1 or TTP:0",
    "{TTP 1}": "'TTP' has no value; write TTP:1 or TTP:0",
    "{TTP:}": "'TTP' has no value; write TTP:1 or TTP:0",
    "{TTP:''}": "'TTP' has no value; write TTP:1 or TTP:0",
    "TTP=1": "'TTP=1' is wrong; write TTP:1",
    "{TTP=1,UCE=1}": "'TTP=1' is wrong; write TTP:1",
    "{TTP = 1}": "'TTP' has no value; write TTP:1 or TTP:0",
    "{TTP:1;UCE:1}": "'TTP:1;UCE:1' is wrong; write TTP:1,UCE:1",
    "{TTP:1; UCE:1}": "'TTP:1;' is wrong; write TTP:1",
    "{TTP:1|UCE:1}": "write TTP:1,UCE:1",
    "{TTP:1},{UCE:1}": "'TTP:1}' is wrong; write TTP:1",
    "{TTP：1}": "'TTP：1' (FULLWIDTH COLON) is wrong; write TTP:1",
    "{TTP:1，UCE:1}": "(FULLWIDTH COMMA) is wrong; write TTP:1,UCE:1",
    "{TTP:1、UCE:1}": "(IDEOGRAPHIC COMMA) is wrong; write TTP:1,UCE:1",
    "｛TTP:1｝": "(FULLWIDTH LEFT CURLY BRACKET) is wrong; write TTP:1",
    "{ＴＴＰ:1}": "(FULLWIDTH LATIN CAPITAL LETTER T) is wrong; write TTP:1",
    "{TTP:１}": "(FULLWIDTH DIGIT ONE) is wrong; write TTP:1",
    "{TTP:1\u3000UCE:1}": "(IDEOGRAPHIC SPACE) is wrong; write TTP:1,UCE:1",
    "{TTP\u3000:1}": "(IDEOGRAPHIC SPACE) is wrong; write TTP:1",
    "{TTP:1\xa0}": "(NO-BREAK SPACE) is wrong; write TTP:1",
    "“TTP”:1": "(LEFT DOUBLE QUOTATION MARK) is wrong; write TTP:1",
    "\ufeff{TTP:1}": "(ZERO WIDTH NO-BREAK SPACE) is wrong; write TTP:1",
    "{TTP\u200b:1}": "(ZERO WIDTH SPACE) is wrong; write TTP:1",
    "{ttp:1}": "'ttp:1' is wrong; write TTP:1",
    "{Arf:1}": "'Arf:1' is wrong; write ARF:1",
    "{TTP:true}": "'TTP:true' is wrong; write TTP:1",
    '{"UCE": false}': "is wrong; write UCE:0",
    "{TSP:on}": "'TSP:on' is wrong; write TSP:1",
    "{TTP:2}": "'TTP:2' is wrong; write TTP:1 or TTP:0",
    "{TTP:10}": "'TTP:10' is wrong; write TTP:1 or TTP:0",
    "{TTP:01}": "'TTP:01' is wrong; write TTP:1 or TTP:0",
    "{TTP:-1}": "'TTP:-1' is wrong; write TTP:1 or TTP:0",
    "{TTP:1:1}": "'TTP:1:1' is wrong; write TTP:1 or TTP:0",
    "{TRE:3}": "'TRE:3' is wrong; write TRE:1, TRE:2 or TRE:0",
    "{ATO:2}": "'ATO:2' is wrong; write ATO:1 or ATO:0",
    "{TTP:1,TTP:1}": "'TTP' stands twice; write it once",
    "{TTP:1,'TTP':0}": "'TTP' stands twice; write it once",
    "{TTPP:1}": "unknown key 'TTPP' (did you mean 'TTP'?)",
    "{AFR:1}": "unknown key 'AFR' (did you mean 'ARF'?)",
    "{UCE:1,HCE:1}": "unknown key 'HCE' (did you mean 'HCCE'?)",
    "{TRE_SNAPSHOT:5}": "unknown key 'TRE_SNAPSHOT' (did you mean 'TRE_SNAPSHOT_STEPS'?)",
    "{HCCL_WATCHDOG:0}": "unknown key 'HCCL_WATCHDOG': it belongs into MS_ENABLE_THM",
    "1": "unknown key '1'; the keys are TTP, UCE,",
    "{:1}": "unknown key ''; the keys are TTP, UCE,",
    "{TRE_SNAPSHOT_STEPS:0}": "must be a whole number above 0, and below 2^31; write for example TRE_SNAPSHOT_STEPS:10",
    "{TRE_SNAPSHOT_STEPS:x}": "must be a whole number above 0",
    "{TRE_SNAPSHOT_STEPS:2147483648}": "below 2^31",
    "{ATO_THRESHOLD:１０}": "(FULLWIDTH DIGIT ONE) is wrong; write ATO_THRESHOLD:10",
    "{ATO:1,ATO_PATH}": "'ATO_PATH' has no value; write for example ATO_PATH:./ato_info.json",
    "{ATO:1,ATO_PATH:/HTTP:10/x.json}": "has TTP:1 in it, which is a switch; choose another path",
    "{ATO:1,ATO_PATH:/x，TTP：1}": "(FULLWIDTH COMMA) is wrong; write ATO_PATH:/x,TTP:1",
    "{ATO:1,ATO_PATH:/\u200b/UCE:1/x.json}": "has UCE:1 in it, which is a switch; choose another path",
    "{TRE_SNAPSHOT_STEPS:\u0661}": "(ARABIC-INDIC DIGIT ONE) must be a whole number",
    "{ATO:1,ATO_PATH:{HOME}/x.json}": "has a brace in it; choose another path",
}


@pytest.mark.parametrize(("text", "normal"), ACCEPTED.items())
def test_what_is_accepted_is_handed_on_in_its_normal_form(text: str, normal: str) -> None:
    assert normal_form(text) == normal
    assert normal_form(normal) == normal
    switches = parse_switches(text)
    assert meant(parse_switches(normal)) == meant(switches)
    assert agree(normal, switches), "all of MindSpore reads it alike"
    others = {key: value for key, value in for_ato(normal).items() if key not in SWITCHES}
    assert {"ATO": "0", **others} == {"ATO": "0", **switches.other}
    assert differs(normal) == ""


@pytest.mark.parametrize(("text", "told"), REFUSED.items())
def test_what_is_refused_names_the_nearest_right_thing(text: str, told: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse_switches(text)
    message = str(error.value)
    assert message.startswith("MS_ENABLE_TFT: ")
    assert told in message
    assert message.isprintable(), "one line, and nothing in it that can't be seen"
    if proposed := re.search(r"write (?:for example )?([A-Z_]+:[^ ]+?)(?:$| or |, )", message):
        parse_switches(proposed[1])
    with pytest.raises(ConfigError):
        normal_form(text)


def test_a_number_that_python_does_not_read() -> None:
    with pytest.raises(ConfigError, match="must be a whole number above 0"):
        parse_switches(f"{{ATO_THRESHOLD:{'1' * 5000}}}")


def test_two_lists_of_forty() -> None:
    assert min(len(ACCEPTED), len(REFUSED)) >= 40


@pytest.mark.parametrize("text", [*ACCEPTED, *REFUSED])
def test_where_mindspore_differs_is_told(text: str) -> None:
    told = differs(text)
    try:
        at_import(text)
    except IndexError:
        assert told.startswith("MindSpore could not be imported")
        return
    assert "imported" not in told
    assert ("may crash" in told) == in_cpp_is_lost(text)
    if text in ACCEPTED:
        assert (told == "") == agree_where_asked(text, parse_switches(text))
    else:
        assert told


def in_cpp_is_lost(text: str) -> bool:
    try:
        in_cpp(text)
    except IndexError:
        return True
    return False


def test_tre_2_without_a_number_of_steps_is_told() -> None:
    """No form of it takes snapshots in MindSpore, and a number is not for us to choose. Here it needs none."""
    assert normal_form("{TRE:2}") == "{TRE:2}"
    assert "TRE:2 needs TRE_SNAPSHOT_STEPS" in differs("{TRE:2}")
    assert differs("{TRE:2,TRE_SNAPSHOT_STEPS:5}") == ""


pairs = st.builds("{}:{}".format, st.sampled_from(SWITCHES), st.sampled_from("01"))
spaces = st.text(" \t\n", max_size=2)


@given(st.lists(pairs, unique_by=lambda pair: pair.partition(":")[0]), st.data())
def test_whatever_stands_between_them(items: list[str], data: st.DataObject) -> None:
    quote = data.draw(st.sampled_from(["", "'", '"']))
    between = data.draw(st.sampled_from([",", " ", ", ", ",,", " , ", "\n"]))
    written = [item.replace(":", f"{quote}{data.draw(spaces)}:{data.draw(spaces)}{quote}") for item in items]
    text = between.join(f"{quote}{item}{quote}" for item in written)
    text = data.draw(st.sampled_from(["", "{", "{ "])) + text + data.draw(st.sampled_from(["", "}", ",}", " }"]))
    switches, normal = parse_switches(text), normal_form(text)
    assert meant(switches) == with_ttp({item[:-2] for item in items if item.endswith(":1")})
    assert agree(normal or "{}", switches)
    assert parse_switches(normal) == switches


@given(st.text(alphabet="TPARFE:1,{} '=0", max_size=20))
def test_any_near_text_gives_a_form_that_all_read_or_one_line(text: str) -> None:
    told = differs(text)
    try:
        normal = normal_form(text)
    except ConfigError as refused:
        message = str(refused)
        assert message.isprintable()
        assert told
        return
    switches = parse_switches(text)
    assert agree(normal, switches)
    assert (told == "" or "TRE:2 needs" in told) == agree_where_asked(text, switches)


def cell(read: set[str]) -> str:
    return ", ".join(f"`{key}`" for key in SWITCHES if key in read) or "nothing"


def test_the_table_of_differences() -> None:
    """Each line of it is what the stand-ins say, and a difference."""
    lines = list(rows("docs/reference/settings.md", "### How MindSpore reads it (2.10)"))
    assert len(lines) >= 12
    for quoted, here, words, imported, cpp in lines:
        text = quoted.strip("`")
        try:
            assert here == f"`{normal_form(text)}`", text
        except ConfigError:
            assert here == "refused", text
        assert words == cell(by_words(text)), text
        try:
            assert imported == cell(on(at_import(text))), text
        except IndexError:
            assert imported == "`IndexError`", text
        assert cpp == ("may crash" if in_cpp_is_lost(text) else cell(on(in_cpp(text)))), text
        assert here == "refused" or not agree_where_asked(text, parse_switches(text)), text


def test_the_ranks_get_the_normal_form(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MS_ENABLE_TFT", "{'ARF' : 1}")
    config.hand_on_switches()
    assert config.given_switches() == config.environ_copy()["MS_ENABLE_TFT"] == "{TTP:1,ARF:1}"
    monkeypatch.delenv("MS_ENABLE_TFT")
    config.hand_on_switches()
    assert "MS_ENABLE_TFT" not in config.environ_copy(), "what is not set stays so: our defaults are not MindSpore's"


# -- what is read


@pytest.mark.parametrize(
    "text",
    [
        "{TTP:1,UCE:1,ARF:1}",
        "TTP:1,UCE:1,ARF:1",
        "{ TTP : 1 , UCE : 1, ARF:1 }",
        '{"TTP":"1","UCE":"1","ARF":"1"}',
        "'{TTP:1,UCE:1,ARF:1}'",
        '"{TTP:1,UCE:1,ARF:1}"',
        "{'TTP': 1, 'UCE': 1, 'ARF': 1,}",
    ],
)
def test_braces_quotes_and_spaces_are_optional(text: str) -> None:
    assert parse_switches(text) == Switches(ttp=True, uce=True, arf=True)


@pytest.mark.parametrize("text", ["", "{}", "  ", "{ }"])
def test_nothing_is_on(text: str) -> None:
    assert parse_switches(text) == Switches()


@pytest.mark.parametrize("key", ["UCE", "ARF"])
def test_implied(key: str) -> None:
    assert parse_switches(f"{{{key}:1}}").ttp
    assert parse_switches(f"{{TTP:0,{key}:1}}").ttp


def test_tre_has_two_ways() -> None:
    assert [parse_switches(f"TRE:{value}").tre for value in (0, 1, 2)] == [0, 1, 2]


def test_other_keys() -> None:
    other = parse_switches("{TRE:2,TRE_SNAPSHOT_STEPS:10,ATO:1,ATO_PATH:/tmp/a:b,ATO_THRESHOLD:3}").other
    assert other == {"TRE_SNAPSHOT_STEPS": "10", "ATO": "1", "ATO_PATH": "/tmp/a:b", "ATO_THRESHOLD": "3"}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{TTP:1}", None),
        ("{ATO:0,ATO_PATH:/x.json}", None),
        ("{ATO_PATH:/x.json}", None),
        ("{ATO:1}", AutoSave("./ato_info.json", 10)),
        ("{ATO:1,ARF:1,ATO_PATH:/x.json,ATO_THRESHOLD:25}", AutoSave("/x.json", 25)),
    ],
)
def test_ato(text: str, expected: AutoSave | None) -> None:
    assert auto_save(parse_switches(text)) == expected


@pytest.mark.parametrize(
    ("text", "steps"),
    [("TRE:2,TRE_SNAPSHOT_STEPS:10", 10), ("TRE:2", 0), ("TRE:1,TRE_SNAPSHOT_STEPS:10", 0), ("ARF:1", 0)],
)
def test_snapshots_for_tre(text: str, steps: int) -> None:
    assert snapshot_steps(parse_switches(text)) == steps


@given(st.sets(st.sampled_from(SWITCHES)))
def test_each_switch_is_itself(on: set[str]) -> None:
    found = parse_switches("{" + ",".join(f"{key}:1" for key in sorted(on)) + "}")
    for key in SWITCHES:
        implied = key == "TTP" and bool(on & {"UCE", "ARF"})
        assert bool(getattr(found, key.lower())) == (key in on or implied)


@given(st.text())
def test_any_text_gives_switches_or_a_config_error(text: str) -> None:
    try:
        parse_switches(text)
    except ConfigError:
        pass
