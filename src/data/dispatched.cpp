#include <accelerate/base/error.hpp>
#include <accelerate/data/detail/loader_impl.hpp>

namespace accelerate::data::detail {

std::string Dispatched::encode() const {
  tree::Writer out;
  for (const std::int64_t value :
       {static_cast<std::int64_t>(kind), static_cast<std::int64_t>(final),
        static_cast<std::int64_t>(share.exists), static_cast<std::int64_t>(share.last), share.first,
        share.count, share.real, share.global_count, share.global_real, remainder,
        position_after}) {
    out.integer(value);
  }
  out.text(payload);
  return out.take();
}

Dispatched Dispatched::decode(const std::string& bytes) {
  tree::Reader in(bytes);
  Dispatched message;
  message.kind = static_cast<Kind>(in.integer());
  message.final = in.integer() != 0;
  message.share.exists = in.integer() != 0;
  message.share.last = in.integer() != 0;
  message.share.first = in.integer();
  message.share.count = in.integer();
  message.share.real = in.integer();
  message.share.global_count = in.integer();
  message.share.global_real = in.integer();
  message.remainder = in.integer();
  message.position_after = in.integer();
  message.payload = in.text();
  return message;
}

}  // namespace accelerate::data::detail
