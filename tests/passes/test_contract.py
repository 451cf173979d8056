"""What callers pass, as text and as data."""
import pytest

from gdn_codegen.cli import main
from gdn_codegen.runtime.build import Build
from gdn_codegen.schedule.contract import PLAIN, Contract, ContractError

TEXTS = ("", "strided", "state=vk", "g=raw/float16",
         "beta=sigmoid,g=raw/bfloat16,k=l2norm,q=l2norm,state=vk/bfloat16/pool/in_place,strided",
         "beta=twice_sigmoid/float16,g=linear,state=float16/checkpoints",
         "state=vk/pool/in_place/positions")


@pytest.mark.parametrize("text", TEXTS)
def test_text_and_contract_are_one(text):
    assert str(Contract.parse(text)) == text
    assert (Contract.parse(text) == PLAIN) == (text == "")


def test_each_contract_has_a_name_of_its_own():
    names = [Build("triton", contract=Contract.parse(x)).name for x in TEXTS]
    assert len(set(names)) == len(names) and names[0] == "gdn_c64_bthd"
    assert all(n.isidentifier() for n in names)


@pytest.mark.parametrize("text", ["g=cooked", "state=kv4", "state", "g", "strided=1", "=raw"])
def test_what_there_is_not_is_refused(text, capsys):
    with pytest.raises(ContractError, match="accept: got"):
        Contract.parse(text)
    assert main(["build", "--target", "triton", "--accept", text, "--out", "/nowhere"]) == 2
    assert "accepted: INPUT=linear|raw" in capsys.readouterr().err


@pytest.mark.parametrize("text, what", [
    ("k=unit,k=l2norm", "how k comes"), ("g=linear/raw", "how g comes"), ("g=raw,g=raw", "how g comes"),
    ("beta=float16/bfloat16", "the dtype of beta"), ("state=float16/bfloat16", "the dtype of states"),
    ("state=vk,state=vk", "state=vk"), ("state=pool/pool", "state=pool"), ("strided,strided", "that inputs are strided")])
def test_nothing_is_said_twice(text, what):
    with pytest.raises(ContractError, match=f"accept: got '{text}', which gives {what}.* twice; accepted: once"):
        Contract.parse(text)
    assert Contract.parse("g=float16,g=raw,state=vk,state=pool") == Contract.parse("g=raw/float16,state=vk/pool")


def test_fields_are_checked():
    with pytest.raises(ContractError, match="inputs: got g='sour'"):
        Contract(inputs=(("g", "sour"),))
    with pytest.raises(ContractError, match="in order"):
        Contract(inputs=(("k", "l2norm"), ("g", "raw")))
    with pytest.raises(ContractError, match="state_dtype: got 'int8'"):
        Contract(state_dtype="int8")
