// Layers run one after the other on few tokens (stack.h), by a team of threads and without a word between: every phase is
// divided among all threads, and between two of them the team waits for its last.
//
// With one token each thread makes norms and activations ready for itself, which is quicker than waiting for another's.
// Results are rounded where they would be if each operator were called alone. Knows no torch.
#pragma once

#include <chrono>
#include <memory>

#include "stack.h"
#include "team.h"

namespace flex {

struct StackCall {
  const Block* blocks;
  const Held* held;  // of each block, those of feed-forwards empty
  int64_t count;
  const std::vector<Group>& groups;
  const std::vector<Rope>& ropes;
  char* x;  // [tokens, hidden], changed in place
  int64_t tokens, hidden;
  Float type;
  int64_t split;
  bool alike;      // rows, see linear.h and attend.h
  Norm last;       // of what comes out, or the identity
  int64_t* spent;  // nanoseconds by phase, or null
};

class StackRun {
 public:
  StackRun(const StackCall& call, const LinearKernels& linear, const Kernels& kernels, int64_t threads);

  int64_t bytes() const { return bytes_; }  // of scratch, which `work` wants aligned to 64
  void work(Team& team, int64_t rank, char* scratch);

 private:
  // Where attention of one block is cut; blocks of one group and shape share it.
  struct Shape {
    int64_t group, heads, kv_heads, head_dim;
    Cut cut;
    int64_t state, scratch;  // floats
  };

  // How often a part of a matrix is gone over, for rows of about equal number.
  struct Passes {
    int64_t count, most;
    int64_t row(int64_t pass, int64_t tokens) const { return tokens * pass / count; }
  };

  struct Member {
    Team& team;
    int64_t rank;
    char* scratch;
    std::chrono::steady_clock::time_point since;
  };

  AttendArgs args(const Block& block, const Held& held) const;
  const Shape& shape(const Block& block) const;
  int64_t at(int64_t& total, int64_t bytes) const {
    const int64_t from = total;
    total += (bytes + 63) / 64 * 64;
    return from;
  }
  int64_t element() const { return bytes_of(call_.type); }
  bool alone() const { return call_.tokens == 1; }

  void wait(Member& m, Phase phase);
  const char* normed(Member& m, const Norm& norm);
  Passes passes(const Part& part) const;
  Prepared prepared(const Member& m, const Part& part, const Passes& passes, int64_t pass, int64_t count) const;
  void prepare(Member& m, const Part& part, const char* x, int64_t stride);
  void tiles(const Member& m, const Part& part, const char* x, int64_t stride, const Out& out, int64_t first, int64_t last);
  void product(Member& m, const Matrix& w, const char* x, int64_t stride, const Out& out);
  void add(Member& m, const Block& block, const Matrix& w, const char* x, int64_t stride, Phase phase);
  void attention(Member& m, int64_t index);
  void heads(Member& m, const AttentionBlock& a, const Held& held);
  void mlp(Member& m, int64_t index);
  Out to(char* y, int64_t stride, const float* bias) const { return {y, stride, call_.type, call_.tokens, bias, false, 0.0f}; }

  const StackCall& call_;
  const LinearKernels& linear_;
  const PointKernels& point_;
  const Kernels& kernels_;
  std::vector<Shape> shapes_;
  std::unique_ptr<std::atomic<size_t>[]> next_;  // piece of each block
  int64_t bytes_ = 0, normed_ = 0, y_ = 0, qkv_ = 0, o_ = 0, gate_up_ = 0, active_ = 0, prepared_ = 0, states_ = 0, pieces_ = 0;
  int64_t floats_ = 0, piece_floats_ = 0;
};

inline StackRun::StackRun(const StackCall& call, const LinearKernels& linear, const Kernels& kernels, int64_t threads)
    : call_(call), linear_(linear), point_(*linear.point), kernels_(kernels), next_(new std::atomic<size_t>[call.count]) {
  int64_t qkv = 0, o = 0, inner = 0, states = 0;
  for (int64_t i = 0; i < call.count; ++i) {
    const Block& b = call.blocks[i];
    next_[i] = 0;
    if (!b.is_attention) {
      floats_ = std::max({floats_, b.mlp.gate_up.floats(), b.mlp.down.floats()});
      inner = std::max(inner, b.mlp.down.k);
      continue;
    }
    const AttentionBlock& a = b.attention;
    floats_ = std::max({floats_, a.qkv.floats(), a.out.floats()});
    qkv = std::max(qkv, a.qkv.n);
    o = std::max(o, a.heads * a.head_dim);
    const auto same = [&](const Shape& s) { return s.group == a.group && s.heads == a.heads && s.kv_heads == a.kv_heads && s.head_dim == a.head_dim; };
    if (std::find_if(shapes_.begin(), shapes_.end(), same) != shapes_.end()) continue;
    const AttendArgs own = args(b, call.held[i]);
    Shape shape{a.group, a.heads, a.kv_heads, a.head_dim, cut(own, call.split), 0, 0};
    int64_t most = 0;
    for (int64_t t = 0; t < own.tile_count; ++t) most = std::max(most, a.heads / a.kv_heads * own.tiles[t].count);
    shape.state = state_floats(own, most);
    shape.scratch = kernels.scratch_floats(own, most);
    states = std::max(states, shape.cut.states * shape.state);
    piece_floats_ = std::max(piece_floats_, (shape.scratch + 15) / 16 * 16);
    shapes_.push_back(std::move(shape));
  }
  const int64_t each = call.tokens * element(), own = alone() ? threads : 1;
  normed_ = at(bytes_, own * ((call.hidden * each + 63) / 64 * 64));
  y_ = at(bytes_, call.hidden * each);
  qkv_ = at(bytes_, qkv * each);
  o_ = at(bytes_, o * each);
  gate_up_ = at(bytes_, 2 * inner * each);
  active_ = at(bytes_, inner * each);
  floats_ = (floats_ + 15) / 16 * 16;
  prepared_ = at(bytes_, (alone() ? threads * TALL_BLOCK : (call.tokens + TALL_ROWS - 1) / TALL_ROWS * TALL_ROWS) * floats_ * 4);
  states_ = at(bytes_, states * 4);
  pieces_ = at(bytes_, threads * piece_floats_ * 4);
}

inline AttendArgs StackRun::args(const Block& block, const Held& held) const {
  const AttentionBlock& b = block.attention;
  const Group& group = call_.groups[b.group];
  AttendArgs a{};
  a.q_token = b.qkv.n, a.q_head = b.head_dim;
  a.q_type = call_.type == Float::fp32 ? Type::fp32 : call_.type == Float::bf16 ? Type::bf16 : Type::fp16;
  a.k = held.k, a.v = held.v;
  a.k_head = held.k_head, a.k_slot = held.k_slot, a.v_head = held.v_head, a.v_slot = held.v_slot;
  a.k_scale = held.k_scale, a.v_scale = held.v_scale, a.slots = held.slots;
  a.kv_type = held.type;
  a.page = held.page;
  a.heads = b.heads, a.kv_heads = b.kv_heads, a.head_dim = b.head_dim, a.v_head_dim = b.head_dim;
  a.tiles = group.tiles.data(), a.tile_count = static_cast<int64_t>(group.tiles.size());
  a.scale = b.scale;
  a.alike = call_.alike;
  a.ops = b.ops.data(), a.op_count = static_cast<int64_t>(b.ops.size());
  a.sinks = b.sinks;
  a.pass = Pass::all;
  return a;
}

inline const StackRun::Shape& StackRun::shape(const Block& block) const {
  const AttentionBlock& a = block.attention;
  for (const Shape& s : shapes_)
    if (s.group == a.group && s.heads == a.heads && s.kv_heads == a.kv_heads && s.head_dim == a.head_dim) return s;
  __builtin_unreachable();
}

inline void StackRun::wait(Member& m, Phase phase) {
  m.team.wait();
  if (!call_.spent || m.rank) return;
  const auto now = std::chrono::steady_clock::now();
  call_.spent[static_cast<int>(phase)] += std::chrono::duration_cast<std::chrono::nanoseconds>(now - m.since).count();
  m.since = now;
}

// x normalized, or x where there is no norm.
inline const char* StackRun::normed(Member& m, const Norm& norm) {
  if (!norm.weight) return call_.x;
  const int64_t row = call_.hidden * element();
  char* out = m.scratch + normed_;
  if (alone()) {
    out += m.rank * ((row + 63) / 64 * 64);
    point_.norm(call_.x, out, norm, call_.hidden, call_.type);
    return out;
  }
  int64_t first, last;
  m.team.share(m.rank, call_.tokens, first, last);
  for (int64_t t = first; t < last; ++t) point_.norm(call_.x + t * row, out + t * row, norm, call_.hidden, call_.type);
  wait(m, Phase::norm);
  return out;
}

inline StackRun::Passes StackRun::passes(const Part& part) const {
  const Rows rows{nullptr, 0, call_.type, call_.tokens, call_.alike};
  const int64_t most = part.kind == Part::int4 ? linear_.pass4(part.q4, rows) : linear_.pass8(part.q8, rows);
  return {(call_.tokens + most - 1) / most, most};
}

inline Prepared StackRun::prepared(const Member& m, const Part& part, const Passes& passes, int64_t pass, int64_t count) const {
  const int padded = padded_rows(count, passes.most);
  float* floats = reinterpret_cast<float*>(m.scratch + prepared_) + (alone() ? m.rank * TALL_BLOCK : pass * passes.most) * floats_;
  return {floats, floats + part.columns() * padded, padded, call_.alike};
}

inline void StackRun::prepare(Member& m, const Part& part, const char* x, int64_t stride) {
  if (part.kind == Part::dense) return;
  const int64_t units = part.kind == Part::int4 ? part.q4.groups : (part.q8.k + COLUMNS - 1) / COLUMNS;
  const Passes passes = this->passes(part);
  for (int64_t pass = 0; pass < passes.count; ++pass) {
    const int64_t from = passes.row(pass, call_.tokens), count = passes.row(pass + 1, call_.tokens) - from;
    const Rows rows{x + from * stride * element(), stride, call_.type, count, call_.alike};
    const Prepared into = prepared(m, part, passes, pass, count);
    int64_t first = 0, last = units;
    if (!alone()) m.team.share(m.rank, units, first, last);
    if (part.kind == Part::int4) linear_.prepare4(part.q4, rows, into, first, last);
    else linear_.prepare8(part.q8, rows, into, first * COLUMNS, std::min(last * COLUMNS, part.q8.k));
  }
  if (!alone()) wait(m, Phase::norm);
}

// Outputs of tiles [first, last) of a part; a tile meets all passes while it is in a cache.
inline void StackRun::tiles(const Member& m, const Part& part, const char* x, int64_t stride, const Out& whole, int64_t first, int64_t last) {
  Out out = whole;
  out.y = static_cast<char*>(whole.y) + part.row * element();
  if (whole.bias) out.bias = whole.bias + part.row;
  if (part.kind == Part::dense) return linear_.dense(part.floats, {x, stride, call_.type, call_.tokens, call_.alike}, out, first, last);
  const Passes passes = this->passes(part);
  const auto pass_of = [&](int64_t pass, int64_t from, int64_t until) {
    const int64_t row = passes.row(pass, call_.tokens);
    Out own = out;
    own.rows = passes.row(pass + 1, call_.tokens) - row;
    own.y = static_cast<char*>(out.y) + row * out.stride * element();
    const Prepared in = prepared(m, part, passes, pass, own.rows);
    if (part.kind == Part::int4) linear_.int4(part.q4, in, call_.type, own, from, until);
    else linear_.int8(part.q8, in, call_.type, own, from, until);
  };
  if (passes.count == 1) return pass_of(0, first, last);
  for (int64_t tile = first; tile < last; ++tile)
    for (int64_t pass = 0; pass < passes.count; ++pass) pass_of(pass, tile, tile + 1);
}

inline void StackRun::product(Member& m, const Matrix& w, const char* x, int64_t stride, const Out& out) {
  for (size_t i = 0; i < w.parts.size(); ++i) {
    const Part& part = w.parts[i];
    if (i && !alone()) m.team.wait();  // the activations are laid out anew where others still read them
    prepare(m, part, x, stride);
    int64_t first, last;
    m.team.share(m.rank, part.tiles(), first, last);
    tiles(m, part, x, stride, out, first, last);
  }
}

// The residual and what a block adds to it.
inline void StackRun::add(Member& m, const Block& block, const Matrix& w, const char* x, int64_t stride, Phase phase) {
  Out out = to(call_.x, call_.hidden, w.bias);
  if (!block.post.weight) {
    out.add = true, out.factor = block.multiplier;
    product(m, w, x, stride, out);
    return wait(m, phase);
  }
  out.y = m.scratch + y_;
  product(m, w, x, stride, out);
  wait(m, phase);
  const int64_t row = call_.hidden * element();
  int64_t first, last;
  m.team.share(m.rank, call_.tokens, first, last);
  for (int64_t t = first; t < last; ++t) {
    char* y = m.scratch + y_ + t * row;
    point_.norm(y, y, block.post, call_.hidden, call_.type);
    point_.add(call_.x + t * row, y, block.multiplier, call_.hidden, call_.type);
  }
  wait(m, Phase::norm);
}

// Norms and turns the heads of q and k, and stores k and v.
inline void StackRun::heads(Member& m, const AttentionBlock& a, const Held& held) {
  const Rope* rope = a.rope < 0 ? nullptr : &call_.ropes[a.rope];
  const Heads h{m.scratch + qkv_, call_.type, call_.tokens, a.heads, a.kv_heads, a.head_dim, a.q_norm, a.k_norm, a.norm_all,
                rope, &held, call_.groups[a.group].slots};
  int64_t first, last;
  if (h.norms_whole()) {
    m.team.share(m.rank, 2 * call_.tokens, first, last);
    norm_whole(point_, h, first, last);
    m.team.wait();
  }
  m.team.share(m.rank, call_.tokens * h.each(), first, last);
  finish_heads(point_, h, first, last);
  wait(m, Phase::rope);
}

inline void StackRun::attention(Member& m, int64_t index) {
  const Block& block = call_.blocks[index];
  const AttentionBlock& b = block.attention;
  char *qkv = m.scratch + qkv_, *o = m.scratch + o_;
  const char* x = normed(m, block.pre);
  product(m, b.qkv, x, call_.hidden, to(qkv, b.qkv.n, b.qkv.bias));
  wait(m, Phase::qkv);
  heads(m, b, call_.held[index]);
  AttendArgs a = args(block, call_.held[index]);
  a.q = qkv, a.out = o;
  const Shape& s = shape(block);
  float* states = reinterpret_cast<float*>(m.scratch + states_);
  float* own = reinterpret_cast<float*>(m.scratch + pieces_) + m.rank * piece_floats_;
  for (size_t i = next_[index]++; i < s.cut.pieces.size(); i = next_[index]++) {
    const Piece& piece = s.cut.pieces[i];
    kernels_.piece(a, piece, own, piece.slot < 0 ? nullptr : states + piece.slot * s.state);
  }
  wait(m, Phase::attention);
  if (!s.cut.merges.empty()) {
    int64_t first, last;
    m.team.share(m.rank, static_cast<int64_t>(s.cut.merges.size()), first, last);
    for (int64_t i = first; i < last; ++i) merge_one(kernels_, a, s.cut.merges[i], states, s.state);
    wait(m, Phase::merge);
  }
  add(m, block, b.out, o, b.heads * b.head_dim, Phase::out);
}

inline void StackRun::mlp(Member& m, int64_t index) {
  const Block& block = call_.blocks[index];
  const Matrix &w = block.mlp.gate_up, &down = block.mlp.down;
  const int64_t inner = down.k, size = element();
  char *both = m.scratch + gate_up_, *active = m.scratch + active_;
  const auto gate = [&](int64_t token, int64_t from, int64_t count) {
    char* g = both + (token * 2 * inner + from) * size;
    point_.gate(g, g + inner * size, active + (token * inner + from) * size, block.mlp.gate, count, call_.type);
  };
  const char* x = normed(m, block.pre);
  const Out out = to(both, 2 * inner, w.bias);
  int64_t first, last;
  if (w.parts.size() == 1 && inner % TILE == 0) {  // a share of the gates and its share of the ups, and nobody need wait
    prepare(m, w.parts[0], x, call_.hidden);
    m.team.share(m.rank, inner / TILE, first, last);
    tiles(m, w.parts[0], x, call_.hidden, out, first, last);
    tiles(m, w.parts[0], x, call_.hidden, out, inner / TILE + first, inner / TILE + last);
    for (int64_t token = 0; token < call_.tokens; ++token) gate(token, first * TILE, (last - first) * TILE);
  } else {
    product(m, w, x, call_.hidden, out);
    m.team.wait();
    m.team.share(m.rank, inner, first, last);
    for (int64_t token = 0; token < call_.tokens; ++token) gate(token, first, last - first);
  }
  wait(m, Phase::gate_up);
  add(m, block, down, active, inner, Phase::down);
}

inline void StackRun::work(Team& team, int64_t rank, char* scratch) {
  Member m{team, rank, scratch, std::chrono::steady_clock::now()};
  for (int64_t i = 0; i < call_.count; ++i) call_.blocks[i].is_attention ? attention(m, i) : mlp(m, i);
  if (!call_.last.weight) return;
  const int64_t row = call_.hidden * element();
  int64_t first, last;
  team.share(rank, call_.tokens, first, last);
  for (int64_t t = first; t < last; ++t) point_.norm(call_.x + t * row, call_.x + t * row, call_.last, call_.hidden, call_.type);
  wait(m, Phase::norm);
}

}  // namespace flex
