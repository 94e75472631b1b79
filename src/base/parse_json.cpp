#include "base/parse_json.hpp"

#include <accelerate/base/error.hpp>
#include <accelerate/base/text.hpp>

#include <set>
#include <string>
#include <utility>
#include <vector>

namespace accelerate {

namespace {

// Json's own parser looks for a key by going through all before it, and with a callback looks at
// all items of the object again after each: both take quadratic time.
class Builder final : public nlohmann::json_sax<Json> {
 public:
  Json value;

  bool null() override { return put(nullptr); }
  bool boolean(bool given) override { return put(given); }
  bool number_integer(number_integer_t given) override { return put(given); }
  bool number_unsigned(number_unsigned_t given) override { return put(given); }
  bool number_float(number_float_t given, const string_t&) override { return put(given); }
  bool string(string_t& given) override { return put(std::move(given)); }
  bool binary(binary_t& given) override { return put(std::move(given)); }
  bool start_object(std::size_t) override { return begin(Json::object()); }
  bool start_array(std::size_t) override { return begin(Json::array()); }
  bool end_object() override { return end(); }
  bool end_array() override { return end(); }

  bool key(string_t& given) override {
    if (!open_.back().keys.insert(given).second)
      throw DataError("The JSON has the key '" + given + "' twice in one object.");
    key_ = std::move(given);
    return true;
  }
  bool parse_error(std::size_t, const std::string&,
                   const nlohmann::detail::exception& error) override {
    throw DataError(text::concat("This is not JSON in UTF-8: ", error.what(), "."));
  }

 private:
  struct Open {
    Json* value;
    std::set<std::string> keys;
  };

  Json* add(Json item) {
    if (open_.empty()) {
      value = std::move(item);
      return &value;
    }
    Json& parent = *open_.back().value;
    if (parent.is_array()) {
      parent.push_back(std::move(item));
      return &parent.back();
    }
    auto& items = parent.get_ref<Json::object_t&>();
    items.push_back({std::move(key_), std::move(item)});
    return &items.back().second;
  }
  bool put(Json item) {
    add(std::move(item));
    return true;
  }
  bool begin(Json item) {
    if (open_.size() == kDeepestJson) {
      throw DataError(text::concat("The JSON has arrays and objects inside each other, more than ",
                                   kDeepestJson, " deep."));
    }
    open_.push_back({add(std::move(item)), {}});
    return true;
  }
  bool end() {
    open_.pop_back();
    return true;
  }

  std::vector<Open> open_;  // those that have not ended yet, the innermost last
  std::string key_;
};

}  // namespace

void scan_json(std::string_view text, nlohmann::json_sax<Json>& reader, JsonComments comments) {
  if (const auto at = text.find('\0'); at != std::string_view::npos)
    throw DataError(text::concat("This is not JSON: byte ", at, " is a NUL."));
  Json::sax_parse(text.begin(), text.end(), &reader, Json::input_format_t::json, /*strict=*/true,
                  comments == JsonComments::ignore);
}

Json parse_json(std::string_view text, JsonComments comments) {
  Builder builder;
  scan_json(text, builder, comments);
  return std::move(builder.value);
}

}  // namespace accelerate
