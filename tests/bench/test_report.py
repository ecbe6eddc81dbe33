"""The reports: what they say, and that the page is one that a phone can show."""

import copy
import dataclasses
import json
import re
import xml.dom.minidom
from html.parser import HTMLParser

import pytest

from nanovllm.bench.job import Repeat, ResultRow
from nanovllm.bench.profile import KernelTime, OpTime, Profile, StepTime, host_times
from nanovllm.bench.profile_report import html_report, over_limit, text_report
from nanovllm.hardware.measured_rates import Rates

RATES = Rates("NVIDIA H200", 4.5e12, 4.5e12, 4.2e12, {"bfloat16": 8e14}, 60 * 2**20, 9e12, 1e-6)


def op(name, phase, us, bytes_, flops, floor, provider="triton"):
    return OpTime(phase, name, "", provider, 28, us, None if phase == "decode" else 300.0, bytes_, flops, floor)


@pytest.fixture(scope="module")
def profile():
    leaf = {"name": "<attention> & co", "us": 600.0, "children": []}
    small = {"name": "tiny", "us": 1.0, "children": []}
    step = {"name": "decode step", "us": 1000.0, "children": [leaf, small]}
    tree = {"name": "host", "us": 1000.0, "children": [step]}
    return Profile(
        "bs128", "128 x 128 -> 256", "qwen3-0.6b",
        {"device": "NVIDIA H200", "dtype": "bfloat16", "kernels": {"rms_norm": "triton", "embedding": "native"}},
        RATES, "bfloat16",
        ops=[op("attention_decode", "decode", 1200.0, 4.5e9, 3e9, 1000.0),
             op("linear", "decode", 800.0, 1.1e9, 1.2e11, 244.0, "torch"),
             op("linear", "prefill", 9000.0, 3e9, 6e12, 7500.0, "torch"),
             op("store_kvcache", "prefill", 90.0, 2e8, 0, 44.0),
             op("no op", "decode", 50.0, 0, 0, None, "torch")],
        steps=[StepTime("prefill", "16384 tokens of 128 prompts", 1, 9500.0, 9100.0, 300, 0.04, 1.0, 9.0, 400.0),
               StepTime("decode", "128 sequences", 6, 2100.0, 2050.0, 290, 0.02, 0.5, 1.5, 45.0)],
        kernels=[KernelTime("decode", "void <flash> kernel", "attention_decode", 28, 1200.0)],
        unprofiled_us=2080.0,
        memory=[{"allocated": 10 * 2**30, "reserved": 11 * 2**30, "kv_blocks_used": 128, "kv_blocks": 900}] * 8,
        flame=tree,
        timeline={"decode": [("attention_decode", 0.0, 40.0), ("linear", 41.0, 20.0)],
                  "prefill": [("linear", 0.0, 300.0)]},
        named_from_eager=True,
    )  # fmt: skip


@pytest.fixture(scope="module")
def rows():
    repeat = Repeat(0.5, 100, 200, 0.01, 0.02, 0.001, 0.002, 5, 5)
    load = "qwen3-0.6b", "bs128", "l"
    mine = ResultRow("nanovllm", "custom", *load, None, [repeat], about={"dtype": "bfloat16"}, mbu=0.4, mfu=0.1)
    native = ResultRow("nanovllm", "native", *load, None, [dataclasses.replace(repeat, seconds=1.0)])
    return [mine, native, ResultRow("vllm", "", *load, "vllm is <not> installed")]


def test_the_text_says_what_was_found(profile, rows):
    text = text_report(profile, rows)
    assert "qwen3-0.6b, NVIDIA H200, bfloat16; workload bs128: 128 x 128 -> 256" in text
    assert "4,500 GB/s (read 4,500, copy 4,200), 800 TFLOP/s bfloat16" in text
    assert "decode: 128 sequences; 2.100 ms a step over 6, 290 kernels in 2.050 ms of it, the GPU idle 2.0%" in text
    assert "2.080 ms without the profiler" in text
    assert re.search(r"decode +attention_decode +triton +28 +1,200.0 +58.5% +- +3,750 +2.5 +83.3%", text)
    assert "bs128: custom kernels are 2.00x native" in text and "ABOVE THE LIMIT" not in text
    assert host_times(profile)[:2] == [("<attention> & co", 600.0), ("decode step", 399.0)]


def test_a_share_above_all_is_said(profile):
    wrong = copy.copy(profile)
    wrong.ops = [op("rms_norm", "decode", 10.0, 9e9, 0, 12.0)]
    assert over_limit(wrong) == ["decode rms_norm: 120.0% of the limit"]
    assert "ABOVE THE LIMIT" in text_report(wrong)


def test_how_overlap_is_counted_is_said_where_there_is_some(profile):
    assert "early us" not in text_report(profile) and "read so much early" not in text_report(profile)
    early = copy.copy(profile)
    first, *others = profile.ops
    early.ops = [dataclasses.replace(first, early_us=321.0), *others]
    text = text_report(early)
    assert "A kernel's time begins when every kernel before it has ended" in text and "read so much early" not in text
    assert re.search(r"attention_decode +triton +28 +1,200.0 +321.0 +58.5%", text)
    early.ops = [dataclasses.replace(first, early_us=321.0, read_early_us=12.0), *others]
    assert "the ops before them: decode attention_decode 12.0 us." in text_report(early)


def test_a_profile_that_counted_otherwise_is_refused(profile):
    old = profile.to_json()
    for o in old["ops"]:
        del o["early_us"]
    with pytest.raises(ValueError, match="made by an earlier version"):
        Profile.from_json(old)


def test_a_profile_survives_json(profile):
    again = Profile.from_json(json.loads(json.dumps(profile.to_json())))
    assert text_report(again) == text_report(profile) and again.ops == profile.ops


@pytest.fixture(scope="module")
def drawn(profile, rows):
    pytest.importorskip("matplotlib", reason="pip install matplotlib")
    from nanovllm.bench.profile_figures import figures

    return figures(profile, rows)


@pytest.fixture(scope="module")
def page(profile, drawn, rows):
    return html_report(profile, drawn, rows)


def test_every_op_has_a_dot(drawn):
    """Ops without arithmetic too: at the left edge, where the roof is the bandwidth."""
    (ax,) = drawn["roofline"].axes
    dots = [line for line in ax.lines if len(line.get_xdata()) == 1]
    assert len(dots) == 4  # all but "no op", of which nothing is known
    (hollow,) = [d for d in dots if d.get_markerfacecolor() == "none"]
    left = ax.get_xlim()[0]
    assert hollow.get_xdata()[0] == pytest.approx(left) and hollow.get_label() == "store_kvcache"
    # 2e8 bytes in 90 us are 2.22e12 a second; the roof there is 4.5e12 times the same intensity.
    assert hollow.get_ydata()[0] == pytest.approx(2e8 / 90e-6 * left / 1e9)


def test_figures_as_files(drawn, tmp_path):
    from nanovllm.bench.profile_figures import write_pngs

    assert set(drawn) == {"roofline", "steps", "timeline", "memory", "comparison"}
    paths = write_pngs(drawn, tmp_path)
    assert len(paths) == 5 and all(p.read_bytes().startswith(b"\x89PNG") and p.stat().st_size > 5000 for p in paths)


class Checker(HTMLParser):
    """Tags that are opened are closed, and nothing refers to anything outside."""

    VOID = {"meta", "br", "use", "path"}

    def __init__(self):
        super().__init__(convert_charrefs=True)
        self.open, self.problems, self.text = [], [], []

    def handle_starttag(self, tag, attrs):
        for name, value in attrs:
            if name in ("src", "href", "xlink:href", "action") and value and not value.startswith("#"):
                self.problems.append((name, value))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in self.VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        if tag not in self.VOID and (not self.open or self.open.pop() != tag):
            self.problems.append(("unbalanced", tag))

    def handle_data(self, data):
        self.text.append(data)


def test_the_page_is_whole_and_needs_nothing_else(page):
    checker = Checker()
    checker.feed(page)
    assert checker.problems == [] and checker.open == []
    text = " ".join(checker.text)
    for said in ("<attention> & co", "void <flash> kernel", "vllm is <not> installed", "Roofline, measured"):
        assert said in text
    assert "@import" not in page and "url(http" not in page and "<script" not in page
    assert 'name="viewport" content="width=device-width' in page
    svgs = re.findall(r"<svg.*?</svg>", page, re.DOTALL)
    assert len(svgs) == 5
    for svg in svgs:
        xml.dom.minidom.parseString(svg)
    assert 'title="tiny' not in page  # a thousandth of the flame graph's width


def test_the_page_in_a_browser(page, browser, tmp_path):
    """No request, nothing wider than the screen, text large enough to read; the screenshot is drawn, not blank."""
    path = tmp_path / "profile_report.html"
    path.write_text(page)
    for width in (390, 1280):
        tab = browser.new_page(viewport={"width": width, "height": 844})
        tab.set_default_timeout(300_000)
        requests, messages = [], []
        tab.on("request", lambda r, seen=requests: seen.append(r.url))
        tab.on("console", lambda m, seen=messages: seen.append(m.text))
        tab.goto(path.as_uri())
        assert requests == [path.as_uri()] and messages == []
        assert tab.evaluate("document.documentElement.scrollWidth") <= width
        sizes = tab.evaluate(
            "[...document.querySelectorAll('svg text')].filter(t => t.textContent.trim())"
            ".map(t => t.getBoundingClientRect())"
            ".map(b => Math.min(b.width, b.height)).filter(s => s > 0)"
        )
        widths = "[...document.querySelectorAll('{}')].map(s => s.getBoundingClientRect().width)"
        boxes, flame = (tab.evaluate(widths.format(of)) for of in (".figure svg", "#flame span"))
        assert len(sizes) > 40 and sorted(sizes)[len(sizes) // 2] >= 8
        assert len(boxes) == 5 and all(0.8 * min(width, 640) <= b <= width for b in boxes)
        assert len(flame) == 3 and flame[0] > 0.8 * min(width, 800) and 0.55 < flame[2] / flame[0] < 0.65
        assert len(tab.screenshot(full_page=True)) > 60_000  # a blank page of this size is a few kB
