"""pytest hooks of an active run: they collect the cases, run them, and decide and report the verdict.

The way of one case through these modules:

1. plugin.py (`pytest_configure`) decides that the run is active. It registers a `CaseRunner` in every
   process, and a `Controller` in the process that a person started: with pytest-xdist that is xdist's
   controller, without xdist it is the only process.
2. `Controller.pytest_sessionstart` starts the zygote, and `Controller.pytest_runtestloop` probes the
   connector. A `ZygoteLink` carries the address of the zygote and the facts of the probe to every worker.
3. `CaseRunner.pytest_make_collect_report` adds a `Suite` to the session. Its tree is Suite, Tier, CaseModule,
   CaseItem (items.py). `CaseRunner.pytest_collection_modifyitems` orders the items cell by cell;
   xdist_scheduling.py gives each cell to one worker.
4. `CaseItem.setup` runs the case on a bench (pytest_kvconform/rigs/bench.py) and turns its exception, or its
   evidence, into a `CaseResult`. The declaration is applied to the result at once.
5. `CaseRunner.pytest_runtest_makereport` puts the result into pytest's report, which travels to the
   controller. `Controller.pytest_runtest_logreport` gathers the results, and prints a line about the whole
   run now and then (overview.py).
6. `Controller.pytest_sessionfinish` closes all engines, decides the verdict, writes `report.json` and sets
   the exit code; `Controller.pytest_terminal_summary_verdict` prints the verdict.

With pytest-xdist, `LostWorkers` (lost_workers.py) ends the run when a worker was killed.

These modules import the upper modules of the plugin (settings, plan, verdict, report). They load the bench
through loading.py, and import nothing of the rigs, torch or vLLM.
"""
