#include "store/output.h"

#include <algorithm>

namespace rallypoint::store {

int Output::pieces(iovec* vectors, int capacity) const {
  int count = 0;
  size_t copied = copied_sent_;
  size_t skip = reference_sent_;
  const auto add = [&](const char* bytes, size_t size) {
    if (size > 0) vectors[count++] = {const_cast<char*>(bytes), size};
  };
  size_t next = first_reference_;
  for (; next < references_.size() && count + 2 <= capacity; ++next) {
    const Reference& reference = references_[next];
    add(copied_.data() + copied, reference.after - copied);
    copied = reference.after;
    add(reference.value.view().data() + skip, reference.value.size() - skip);
    skip = 0;
  }
  if (next == references_.size() && count < capacity) {
    add(copied_.data() + copied, copied_.size() - copied);
  }
  return count;
}

void Output::consume(size_t size) {
  pending_ -= size;
  while (size > 0) {
    const bool has_reference = first_reference_ < references_.size();
    const size_t until = has_reference ? references_[first_reference_].after : copied_.size();
    const size_t copied = std::min(size, until - copied_sent_);
    copied_sent_ += copied;
    size -= copied;
    if (!has_reference) continue;
    Value& value = references_[first_reference_].value;
    const size_t referenced = std::min<size_t>(size, value.size() - reference_sent_);
    reference_sent_ += referenced;
    size -= referenced;
    if (copied_sent_ == until && reference_sent_ == value.size()) {
      value = Value();
      ++first_reference_;
      reference_sent_ = 0;
    }
  }
  if (pending_ > 0) return;
  if (copied_.capacity() > kKeepCapacity || references_.capacity() > 0) {
    *this = Output();
  } else {
    copied_.clear();
    copied_sent_ = 0;
  }
}

}  // namespace rallypoint::store
