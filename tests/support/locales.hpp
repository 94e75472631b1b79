#pragma once

#include <unistd.h>

#include <clocale>
#include <cstdlib>
#include <filesystem>
#include <locale>
#include <string>

namespace accelerate::testing {

/// Numbers as in German: 1.234.567,5.
struct GermanNumbers : std::numpunct<char> {
  char do_decimal_point() const override { return ','; }
  char do_thousands_sep() const override { return '.'; }
  std::string do_grouping() const override { return "\3"; }
};

/// While it lives, C++'s global locale writes numbers as in German. Needs no locale of the system.
class GermanStreams {
 public:
  GermanStreams()
      : before_(std::locale::global(std::locale(std::locale::classic(), new GermanNumbers))) {}
  ~GermanStreams() { std::locale::global(before_); }
  GermanStreams(const GermanStreams&) = delete;
  GermanStreams& operator=(const GermanStreams&) = delete;

 private:
  std::locale before_;
};

/// While it lives, C's locale, which printf and strtod follow, is `name` ("de_DE", "tr_TR"), made
/// in a folder of its own where the system has the sources of locales and the program localedef.
class CLocale {
 public:
  explicit CLocale(const std::string& name) {
    std::string folder = (std::filesystem::temp_directory_path() / "accelerate_locale_XXXXXX");
    if (mkdtemp(folder.data()) == nullptr) return;
    folder_ = folder;
    const std::string target = name + ".UTF-8";
    const std::string command =
        "localedef -i " + name + " -f UTF-8 " + (folder_ / target).string() + " >/dev/null 2>&1";
    if (std::system(command.c_str()) != 0) return;
    setenv("LOCPATH", folder_.c_str(), 1);
    found_ = std::setlocale(LC_ALL, target.c_str()) != nullptr;
  }
  ~CLocale() {
    std::setlocale(LC_ALL, "C");
    unsetenv("LOCPATH");
    std::error_code ignored;
    if (!folder_.empty()) std::filesystem::remove_all(folder_, ignored);
  }
  CLocale(const CLocale&) = delete;
  CLocale& operator=(const CLocale&) = delete;

  bool found() const { return found_; }

 private:
  std::filesystem::path folder_;
  bool found_ = false;
};

}  // namespace accelerate::testing
