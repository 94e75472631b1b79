"""Shows that check_architecture.py finds what it is there to find, in a tree made up for it."""

import contextlib
import io
import tempfile
import unittest
from pathlib import Path

import check_architecture


class Check(unittest.TestCase):
    def problems(self, files):
        with tempfile.TemporaryDirectory() as folder:
            root = Path(folder).resolve()
            for name, text in files.items():
                path = root / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(("#pragma once\n" if name.endswith(".hpp") else "") + text)
            output = io.StringIO()
            with contextlib.redirect_stdout(output):
                code = check_architecture.main(root)
            self.assertEqual(code, 0 if " 0 problems" in output.getvalue() else 1)
            return output.getvalue()

    def assert_found(self, name, text, problem):
        self.assertIn(problem, self.problems({name: text}))

    def test_accepts_what_the_table_allows(self):
        found = self.problems({
            "include/accelerate/comm/a.hpp": "#include <accelerate/core/b.hpp>\n#include <accelerate/base/c.hpp>\n",
            "src/comm/a.cpp": '#include "comm/inner.hpp"\n#include <torch/torch.h>\nvoid B::abort() { store->abort(); }\n',
            "src/optim/a.cpp": "#include <accelerate/parallel/strategy.hpp>\n",
            "src/parallel/ddp.cpp": '#include <accelerate/parallel/ddp.hpp>\n#include "parallel/consistency.hpp"\n',
            "include/accelerate/accelerate.hpp": "#include <accelerate/accelerator/a.hpp>\n",
        })
        self.assertIn("5 files, 0 problems", found)

    def test_refuses_rooms_the_table_does_not_give(self):
        self.assert_found("src/core/a.cpp", "#include <accelerate/comm/group.hpp>\n", "core may not use comm")
        self.assert_found("src/core/a.cpp", '#include "comm/inner.hpp"\n', "core may not use comm")
        self.assert_found("src/optim/a.cpp", "#include <accelerate/parallel/ddp.hpp>\n", "optim may not use parallel")
        self.assert_found("src/cellar/a.cpp", "", "no room cellar")
        self.assert_found("src/parallel/fsdp_unit.cpp", '#include "parallel/ddp.hpp"\n', "fsdp may not know of ddp")

    def test_refuses_headers_that_cost_or_clash(self):
        self.assert_found("include/accelerate/core/a.hpp", "#include <torch/torch.h>\n", "too wide")
        self.assert_found("src/launch/a.cpp", "#include <c10/util/Exception.h>\n", "has no LibTorch in it")
        self.assert_found("src/core/a.cpp", "#include <spdlog/spdlog.h>\n", "logging goes through")
        self.assert_found("src/core/a.cpp", "#include <pybind11/pybind11.h>\n", "no Python")
        self.assert_found("include/accelerate/core/a.hpp", '#include "core/inner.hpp"\n', "not installed")
        self.assert_found("src/core/a.cpp", '#include "accelerate/core/b.hpp"\n', "angle brackets")

    def test_refuses_to_end_the_users_process(self):
        for call in ("exit(1);", "std::abort();", "std::terminate();", "::abort();", "_Exit(2);"):
            self.assert_found("src/core/a.cpp", f"void f() {{ {call} }}\n", "ends the user's process")

    def test_refuses_to_parse_json_in_other_places(self):
        for call in ("Json::parse(text)", "nlohmann::json::sax_parse(a, b)", "Json::accept (text)", 'R"({})"_json'):
            self.assert_found("src/core/a.cpp", f"void f() {{ use({call}); }}\n", "parse_json()")
            self.assert_found("include/accelerate/core/a.hpp", f"inline void f() {{ use({call}); }}\n", "parse_json()")
        self.assertIn("0 problems", self.problems({"src/base/parse_json.cpp": "void f() { Json::parse(text); }\n"}))

    def test_refuses_files_that_grew_too_long(self):
        self.assert_found("src/core/a.cpp", "\n" * 801, "801 lines")


if __name__ == "__main__":
    unittest.main()
