"""Claims of README and docs, and whether a test of each fails when the code behind it is taken out: `make claims`.

A claim whose test passes without the code behind it is not tested. So each claim names the lines that make it true. `make claims`
copies the tree, takes out the lines of one claim at a time, and expects each test that the claim names to fail. docs/claims.md
is rendered from the same entries (`python -m campaigns.claims --write`), and tests/campaigns/test_claims.py checks both.

The entries lie beside this file, one TOML file an area, each a list of:

    [[claim]]
    claim = "A version with a damaged row is no longer served."   # one sentence
    said_in = "docs/operations.md"
    quote = "no longer\nserved"                  # optional: words that stand in said_in, however its lines are broken
    test = "tests/serving/test_watch.py::test_damage_after_attach_is_found"     # or a list; each of them has to fail
    file = "serving/scrub.py"
    delete = "    self._mark()\n"                # exact text, which occurs once in the file
    instead = "    pass\n"                       # optional: what is put in its place
    also = [{file = "...", delete = "..."}]      # optional: taken out together with it
    build = true                                 # optional: a C extension is compiled anew
    gpu = true                                   # optional: the tests need a GPU (`--device cuda:0`)
    error = "ImportError"                        # optional: the claim is about this error, which else means a broken deletion

entries.py reads and checks them, page.py renders them, trial.py tries them on copies of the tree, build.py compiles what a trial
needs.
"""
