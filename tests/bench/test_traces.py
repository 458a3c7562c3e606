"""Trace files: what is read and what is refused."""

import gzip

import pytest

from jpaged.bench.traces import TraceRow, read_lengths, read_trace


@pytest.mark.parametrize(
    "text",
    [
        "input_len,output_len\n3,4\n5,6\n",
        "3,4\n5,6\n",
        "\ufeffInput_Tokens,Output_Tokens\r\n3,4\r\n\r\n5,6",
        "arrival_ms,num,output_len,prompt_len\n0,9,4,3\n1,9,6,5\n",
        "input_len,output_len\n3.0,4.0\n5,6\n0,7\n",
    ],
)
def test_a_trace_is_read_by_its_header_or_its_first_columns(tmp_path, text):
    (tmp_path / "trace.csv").write_text(text, encoding="utf-8")
    (tmp_path / "trace.csv.gz").write_bytes(gzip.compress(text.encode()))
    assert read_lengths(tmp_path / "trace.csv") == read_lengths(tmp_path / "trace.csv.gz") == [(3, 4), (5, 6)]
    assert read_lengths(tmp_path / "trace.csv", max_total=7) == [(3, 4)]


@pytest.mark.parametrize(
    "text, why",
    [
        ("", "empty"),
        ("a,b\n1,2\n", "line 1: no column is named like input"),
        ("1,2\n3\n", "line 2"),
        ("1,2\n1.5,2\n", "line 2"),
        ("0,0\n", "no lengths"),
    ],
)
def test_what_is_no_trace_is_refused(tmp_path, text, why):
    (tmp_path / "trace.csv").write_text(text)
    with pytest.raises(ValueError, match=why):
        read_lengths(tmp_path / "trace.csv")


@pytest.mark.parametrize(
    "text",
    [
        "arrival,input,output\n10,3,4\n11.5,5,6\n",
        "index,arrival_ms,input_len,output_len\n0,10000,3,4\n1,11500,5,6\n",
    ],
)
def test_arrivals_are_seconds_or_what_the_columns_name_says(tmp_path, text):
    (tmp_path / "trace.csv").write_text(text)
    assert read_trace(tmp_path / "trace.csv") == [TraceRow(3, 4, 10.0), TraceRow(5, 6, 11.5)]


def test_azures_header_and_its_dates_are_read(tmp_path):
    rows = "2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.9951690,396,109\n"
    text = "TIMESTAMP,ContextTokens,GeneratedTokens\n" + rows
    (tmp_path / "trace.csv").write_text(text)
    first, second = read_trace(tmp_path / "trace.csv")
    assert first[:2] == (374, 44) and second[:2] == (396, 109)
    assert second.arrival - first.arrival == pytest.approx(4.314579, abs=1e-5)


def test_an_arrival_that_is_none_is_refused_with_its_line(tmp_path):
    (tmp_path / "trace.csv").write_text("arrival,input,output\n0,3,4\nsoon,5,6\n")
    with pytest.raises(ValueError, match="line 3: expected an arrival and two lengths, got 'soon,5,6'"):
        read_trace(tmp_path / "trace.csv")
