import pytest

from paper.downloads import download

CONTENT = bytes(range(256)) * 2_000


def test_a_cut_download_is_resumed(tmp_path, server, serve, md5):
    url, path = serve({"a.bin": CONTENT}) + "a.bin", tmp_path / "deep" / "a.bin"
    server.cut_at = 200_000
    with pytest.raises(ConnectionError, match="broke off at 200000 of 512000 bytes"):
        download(url, path, md5(CONTENT), show_progress=False)
    assert not path.exists()
    assert path.with_name("a.bin.part").stat().st_size == 200_000

    server.cut_at = None
    assert download(url, path, md5(CONTENT), show_progress=False) == path
    assert path.read_bytes() == CONTENT
    assert server.requests == [None, "bytes=200000-"]
    assert [p.name for p in path.parent.iterdir()] == ["a.bin"]

    download(url, path, md5(CONTENT))  # already there: not asked for again
    assert len(server.requests) == 2


def test_a_server_without_ranges_starts_over(tmp_path, server, serve, md5):
    server.ranges = False
    (tmp_path / "a.bin.part").write_bytes(b"stale" * 100)
    path = download(serve({"a.bin": CONTENT}) + "a.bin", tmp_path / "a.bin", md5(CONTENT), show_progress=False)
    assert path.read_bytes() == CONTENT


def test_a_whole_part_needs_no_more_bytes(tmp_path, serve, md5):
    (tmp_path / "a.bin.part").write_bytes(CONTENT)
    path = download(serve({"a.bin": CONTENT}) + "a.bin", tmp_path / "a.bin", md5(CONTENT), show_progress=False)
    assert path.read_bytes() == CONTENT


def test_wrong_contents_never_get_the_final_name(tmp_path, serve, md5):
    url = serve({"a.bin": CONTENT}) + "a.bin"
    with pytest.raises(ValueError, match=f"expected MD5 {md5(b'other')}, got {md5(CONTENT)}"):
        download(url, tmp_path / "a.bin", md5(b"other"), show_progress=False)
    assert list(tmp_path.iterdir()) == []

    (tmp_path / "a.bin").write_bytes(b"mine")
    with pytest.raises(ValueError, match="Remove the file"):
        download(url, tmp_path / "a.bin", md5(CONTENT), show_progress=False)
    assert (tmp_path / "a.bin").read_bytes() == b"mine"


def test_a_missing_file_leaves_nothing(tmp_path, serve):
    with pytest.raises(OSError, match="404"):
        download(serve({}) + "a.bin", tmp_path / "a.bin", "0" * 32, show_progress=False)
    assert list(tmp_path.iterdir()) == []
