#include "wordpiece.hpp"

#include "wordpiece_tables.hpp"

#include <nlohmann/json.hpp>

#include <algorithm>
#include <fstream>
#include <iterator>
#include <stdexcept>

namespace wordpiece {
namespace {

namespace fs = std::filesystem;

template <std::size_t N>
bool is_in(char32_t c, const Range (&ranges)[N]) {
  const Range* after =
      std::upper_bound(std::begin(ranges), std::end(ranges), c,
                       [](char32_t code, const Range& r) { return code < r.first; });
  return after != std::begin(ranges) && c <= std::prev(after)->last;
}

bool is_space(char32_t c) {
  return c == ' ' || c == '\t' || c == '\n' || c == '\r' || (c >= 0x80 && is_in(c, kSpaces));
}

bool is_control(char32_t c) {
  if (c == '\t' || c == '\n' || c == '\r') return false;
  return c < 0x20 || c == 0x7F || (c >= 0x80 && is_in(c, kControl));
}

bool is_punctuation(char32_t c) {
  const bool ascii = (c >= 33 && c <= 47) || (c >= 58 && c <= 64) || (c >= 91 && c <= 96) ||
                     (c >= 123 && c <= 126);
  return ascii || (c >= 0x80 && is_in(c, kPunctuation));
}

bool is_ideograph(char32_t c) {
  return (c >= 0x4E00 && c <= 0x9FFF) || (c >= 0x3400 && c <= 0x4DBF) ||
         (c >= 0x20000 && c <= 0x2A6DF) || (c >= 0x2A700 && c <= 0x2CEAF) ||
         (c >= 0xF900 && c <= 0xFAFF) || (c >= 0x2F800 && c <= 0x2FA1F);
}

char32_t fold(char32_t c) {
  if (c < 0x80) return c >= 'A' && c <= 'Z' ? c + 32 : c;
  const auto found = std::lower_bound(kLetters.begin(), kLetters.end(), c);
  if (found == kLetters.end() || *found != c) return c;
  return kFolded[static_cast<std::size_t>(found - kLetters.begin())];
}

// Bytes that are no UTF-8 become U+FFFD, which is dropped later as the original does.
std::u32string decode(const std::string& text) {
  std::u32string codes;
  for (std::size_t i = 0; i < text.size();) {
    const auto first = static_cast<unsigned char>(text[i++]);
    const int more = first < 0x80                    ? 0
                     : first >= 0xF0 && first < 0xF8 ? 3
                     : first >= 0xE0 && first < 0xF0 ? 2
                     : first >= 0xC2 && first < 0xE0 ? 1
                                                     : -1;
    char32_t code = more <= 0 ? first : first & (0x3F >> more);
    bool valid = more >= 0;
    for (int k = 0; valid && k < more; ++k) {
      valid = i < text.size() && (static_cast<unsigned char>(text[i]) & 0xC0) == 0x80;
      if (valid) code = (code << 6) | (static_cast<unsigned char>(text[i++]) & 0x3F);
    }
    codes.push_back(valid ? code : 0xFFFD);
  }
  return codes;
}

void encode(char32_t code, std::string& text) {
  const auto add = [&](char32_t bits) { text.push_back(static_cast<char>(bits)); };
  if (code < 0x80) return add(code);
  if (code < 0x800) {
    add(0xC0 | (code >> 6));
  } else if (code < 0x10000) {
    add(0xE0 | (code >> 12));
    add(0x80 | ((code >> 6) & 0x3F));
  } else {
    add(0xF0 | (code >> 18));
    add(0x80 | ((code >> 12) & 0x3F));
    add(0x80 | ((code >> 6) & 0x3F));
  }
  add(0x80 | (code & 0x3F));
}

}  // namespace

Tokenizer::Tokenizer(const fs::path& folder) {
  if (fs::exists(folder / "tokenizer.json")) {
    read_json(folder / "tokenizer.json");
  } else if (fs::exists(folder / "vocab.txt")) {
    read_vocabulary(folder / "vocab.txt");
    std::ifstream config(folder / "tokenizer_config.json");
    if (config) {
      const auto settings = nlohmann::json::parse(config);
      lower_case_ = settings.value("do_lower_case", true);
      strip_accents_ = lower_case_;
      if (settings.contains("strip_accents") && settings["strip_accents"].is_boolean())
        strip_accents_ = settings["strip_accents"];
    }
  } else {
    throw std::runtime_error("There is neither tokenizer.json nor vocab.txt in " + folder.string() +
                             ".");
  }
  begin_ = id("[CLS]");
  end_ = id("[SEP]");
  unknown_ = id(unknown_token_);
  padding_ = id("[PAD]");
}

void Tokenizer::read_json(const fs::path& file) {
  std::ifstream in(file);
  const auto parsed = nlohmann::json::parse(in);
  const auto& model = parsed.at("model");
  if (model.value("type", "WordPiece") != "WordPiece" || !model.at("vocab").is_object())
    throw std::runtime_error(file.string() + " is not a WordPiece tokenizer's.");
  vocabulary_ = model.at("vocab").get<std::unordered_map<std::string, std::int64_t>>();
  continues_ = model.value("continuing_subword_prefix", continues_);
  longest_word_ = model.value("max_input_chars_per_word", longest_word_);
  unknown_token_ = model.value("unk_token", unknown_token_);
  if (parsed.contains("normalizer") && parsed["normalizer"].is_object()) {
    const auto& normalizer = parsed["normalizer"];
    lower_case_ = normalizer.value("lowercase", true);
    split_ideographs_ = normalizer.value("handle_chinese_chars", true);
    strip_accents_ = lower_case_;
    if (normalizer.contains("strip_accents") && normalizer["strip_accents"].is_boolean())
      strip_accents_ = normalizer["strip_accents"];
  }
}

void Tokenizer::read_vocabulary(const fs::path& file) {
  std::ifstream in(file);
  std::int64_t next = 0;
  for (std::string line; std::getline(in, line); ++next) {
    if (!line.empty() && line.back() == '\r') line.pop_back();
    vocabulary_.insert_or_assign(line, next);
  }
}

std::int64_t Tokenizer::id(const std::string& piece) const {
  const auto found = vocabulary_.find(piece);
  if (found == vocabulary_.end())
    throw std::runtime_error("The tokenizer's vocabulary does not have " + piece + ".");
  return found->second;
}

std::vector<std::u32string> Tokenizer::words(const std::string& text) const {
  std::vector<std::u32string> words(1);
  const auto end_word = [&] {
    if (!words.back().empty()) words.emplace_back();
  };
  for (char32_t c : decode(text)) {
    if (c == 0 || c == 0xFFFD || is_control(c)) continue;
    if (is_space(c)) {
      end_word();
      continue;
    }
    const bool mark = c >= 0x80 && is_in(c, kMarks);
    if (strip_accents_ && mark) continue;
    if (lower_case_) c = strip_accents_ || c < 0x80 ? fold(c) : c;
    if (is_punctuation(c) || (split_ideographs_ && is_ideograph(c))) {
      end_word();
      words.back().push_back(c);
      end_word();
    } else {
      words.back().push_back(c);
    }
  }
  if (words.back().empty()) words.pop_back();
  return words;
}

void Tokenizer::split_word(const std::u32string& word, std::vector<std::int64_t>& ids) const {
  if (word.size() > longest_word_) {
    ids.push_back(unknown_);
    return;
  }
  const std::size_t before = ids.size();
  for (std::size_t begin = 0; begin < word.size();) {
    std::size_t end = word.size();
    for (; end > begin; --end) {
      std::string piece = begin > 0 ? continues_ : std::string();
      for (std::size_t i = begin; i < end; ++i) wordpiece::encode(word[i], piece);
      if (const auto found = vocabulary_.find(piece); found != vocabulary_.end()) {
        ids.push_back(found->second);
        break;
      }
    }
    if (end == begin) {  // no piece fits: the word is unknown as a whole
      ids.resize(before);
      ids.push_back(unknown_);
      return;
    }
    begin = end;
  }
}

std::vector<std::int64_t> Tokenizer::encode(const std::string& text, std::size_t most) const {
  std::vector<std::int64_t> ids{begin_};
  for (const std::u32string& word : words(text)) split_word(word, ids);
  if (ids.size() + 1 > most) ids.resize(std::max<std::size_t>(most, 2) - 1);
  ids.push_back(end_);
  return ids;
}

}  // namespace wordpiece
