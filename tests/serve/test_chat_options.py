"""The server's own chat template, and variables of it for requests that do not set them."""

import pytest

from nanovllm.cli.serve_options import ChatOptions
from nanovllm.serve.options import ServeOptions
from tests import tiny
from tests.serve.running import RunningServer

MESSAGES = [{"role": "user", "content": "hi"}]
TEMPLATE = "{% for m in messages %}[{{ m.content }}]{% endfor %}{{ style }}{% if enable_thinking %}<think>{% endif %}"


@pytest.fixture(scope="module")
def styled(model_path):
    options = ServeOptions(chat_template=TEMPLATE, chat_template_kwargs={"style": "x", "enable_thinking": True})
    with RunningServer(model_path, options) as running:
        yield running


def prompt(server, path="/v1/chat/completions", **fields):
    return server.post("/tokenize", messages=MESSAGES, **fields)["tokens"]


def test_the_template_and_its_variables(styled):
    encode = tiny.tokenizer().encode
    assert prompt(styled) == encode("[hi]x<think>")
    given = {"style": "yy", "enable_thinking": False}
    assert prompt(styled, chat_template_kwargs=given) == encode("[hi]yy")
    whole = styled.post("/v1/chat/completions", messages=MESSAGES, max_tokens=2, return_token_ids=True)
    assert whole["prompt_token_ids"] == encode("[hi]x<think>")
    assert whole["choices"][0]["message"]["reasoning_content"], "the template is looked at for reasoning, too"
    counted = {name: styled.post("/v1/messages/count_tokens", messages=MESSAGES, **more)["input_tokens"]
               for name, more in {"default": {}, "off": {"thinking": {"type": "disabled"}}}.items()}  # fmt: skip
    assert counted == {"default": len(encode("[hi]x<think>")), "off": len(encode("[hi]x"))}


def test_the_options(tmp_path):
    file = tmp_path / "t.jinja"
    file.write_text(TEMPLATE)
    assert ChatOptions().template() is None and ChatOptions().variables() == {}
    assert ChatOptions(chat_template=str(file)).template() == ChatOptions(chat_template=TEMPLATE).template() == TEMPLATE
    assert ChatOptions(default_chat_template_kwargs='{"enable_thinking": false}').variables() == {
        "enable_thinking": False
    }
    with pytest.raises(ValueError, match="--chat-template '.*none': cannot be read: No such file or directory; pass a"):
        ChatOptions(chat_template=str(tmp_path / "none")).template()
    with pytest.raises(ValueError, match="--chat-template '{% for %}'.* Jinja"):
        ChatOptions(chat_template="{% for %}").template()
    with pytest.raises(ValueError, match="--default-chat-template-kwargs no: must be a JSON object"):
        ChatOptions(default_chat_template_kwargs="no").variables()
    with pytest.raises(ValueError, match="default_chat_template_kwargs=.*'tokenize' is not for the template; leave"):
        ServeOptions(chat_template_kwargs={"tokenize": True})
