#!/usr/bin/env python3
"""Prints examples/support/wordpiece_tables.hpp: what BERT's tokenizer has to know of Unicode, from Python's
unicodedata.

    python3 tools/make_wordpiece_tables.py > examples/support/wordpiece_tables.hpp
"""

import textwrap
import unicodedata


def category(code):
    return unicodedata.category(chr(code))


def folded(code):
    decomposed = unicodedata.normalize("NFD", chr(code).lower())
    return "".join(c for c in decomposed if unicodedata.category(c) != "Mn")


def ranges(belongs):
    found = []
    for code in range(0x80, 0x10000):
        if not belongs(code):
            continue
        if found and found[-1][1] == code - 1:
            found[-1][1] = code
        else:
            found.append([code, code])
    return found


def print_ranges(name, comment, belongs):
    text = " ".join(f"{{0x{first:X}, 0x{last:X}}}," for first, last in ranges(belongs))
    print(f"/// {comment}\ninline constexpr Range {name}[] = {{")
    print(textwrap.fill(text, 96, initial_indent="    ", subsequent_indent="    ", break_on_hyphens=False))
    print("};\n")


def print_text(name, text):
    print(f"inline constexpr std::u32string_view {name} =")
    lines = [text[i:i + 80] for i in range(0, len(text), 80)]
    print("\n".join(f'    U"{line}"' for line in lines) + ";")


def main():
    print("#pragma once\n\n#include <string_view>\n\n// Made by tools/make_wordpiece_tables.py.\n"
          "// clang-format off\nnamespace wordpiece {\n\nstruct Range {\n  char32_t first, last;\n};\n")
    print_ranges("kMarks", "Accents that stand after their letter.", lambda c: category(c) == "Mn")
    print_ranges("kPunctuation", "Beyond ASCII.", lambda c: category(c).startswith("P"))
    print_ranges("kControl", "Beyond ASCII.", lambda c: category(c) in ("Cc", "Cf"))
    print_ranges("kSpaces", "Beyond ASCII.", lambda c: category(c) == "Zs")
    pairs = [(chr(c), folded(c)) for c in range(0x80, 0x2000) if category(c) != "Mn"]
    pairs = [(a, b) for a, b in pairs if len(b) == 1 and a != b]
    print("/// Letters, and at the same place in the other what they are without case and accent.")
    print_text("kLetters", "".join(a for a, b in pairs))
    print_text("kFolded", "".join(b for a, b in pairs))
    print("\n}  // namespace wordpiece\n// clang-format on")


if __name__ == "__main__":
    main()
