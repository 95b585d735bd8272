"""What a run writes for people besides `report.json`: the page, and the summary of a CI job.

Neither is part of the result. If one cannot be written, a sentence reports that, and the verdict stays.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from pytest_kvconform.report import markdown, page
from pytest_kvconform.report.document import Report


def write_for_people(report: Report, folder: Path, with_page: bool, job_summary: str | None) -> Iterator[str]:
    """Write the page into the folder of the report, and append the summary to the file `job_summary`.

    Without a page the one of an earlier report is removed. `job_summary`: None: it is not wanted. Yields a
    sentence about the page, and one if the summary cannot be written.
    """
    path = folder / page.FILE
    if with_page:
        try:
            yield f"page: {page.write(report, path)}"
        except OSError as error:
            yield f"{path} cannot be written: {error.strerror}"
    else:
        page.remove(path)
    if job_summary:
        try:
            with open(job_summary, "a", encoding="utf-8") as file:
                file.write(markdown.job_summary(report))
        except OSError as error:
            yield f"no summary was appended to {job_summary}: {error.strerror}"
