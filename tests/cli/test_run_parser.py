"""Null on the command line, as jsonargparse passes it on to the parser of a nested class."""

import pytest

from lrl.cli.run_parser import none_as_null


@pytest.mark.parametrize(
    ("word", "read"),
    [
        ("--a=None", "--a=null"),
        ("--a=[{'b': None, 'c': 1e-05}]", "--a=[{'b': null, 'c': 1e-05}]"),
        ("--a={'b': [None], 1: '1e-5'}", "--a={'b': [null], 1: '1e-5'}"),
        ("--a=['None', \"None's\", None]", "--a=['None', \"None's\", null]"),
        ("--a={'later': None, 'earlier': 1}", "--a={'later': null, 'earlier': 1}"),
        *((text, text) for text in ("--a=(None)", "--a= None", "--a=None # x", "--a={{None}}", "--a=[None,]")),
        *((text, text) for text in ("--a=xNone", "--a='None'", "--a={None}", "--a=(None,)", "--None", "--a=")),
    ],
)
def test_none_of_parsed_values_is_null_and_texts_stay(word, read):
    assert none_as_null(word) == read
