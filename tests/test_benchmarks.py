"""The benchmarks' command line; no test asserts a timing."""

import pytest

from tests.models import need_kimi_linear


@pytest.mark.parametrize(("gpu", "absent"), [(False, "peers"), (True, "writing")])
def test_a_row_that_the_machine_does_not_have_is_refused_and_those_it_has_are_listed(monkeypatch, capsys, gpu, absent):
    need_kimi_linear()
    from benchmarks import all as benchmarks

    monkeypatch.setattr("torch.cuda.is_available", lambda: gpu)
    for name in ("nope", absent):
        monkeypatch.setattr("sys.argv", ["benchmarks", "--only", "sink", name])
        with pytest.raises(SystemExit) as failure:
            benchmarks.main()
        assert failure.value.code == 2
        told = capsys.readouterr().err
        assert f"'{name}'" in told.partition("(choose from")[0]
        assert all(row in told for row in benchmarks.rows(gpu=gpu))
