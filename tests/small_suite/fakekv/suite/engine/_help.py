raise AssertionError("a file that begins with _ is no module of cases")
