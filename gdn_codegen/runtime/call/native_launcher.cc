// What a settled call does on the host, without Python between its kernels: compare its options and the kinds of its tensors with
// those it was made for, allocate results and workspaces, launch. Knows no algorithm: runtime/call/native_launcher.py says what
// the arguments are.
#include "native_driver.h"
#include "native_keywords.h"
#include "native_launcher.h"

namespace {
struct Launcher {
  std::vector<std::optional<Kind>> kinds;
  std::vector<Kind> made;
  std::vector<DLDataType> dtypes;  // of arguments, then of results, then of cu_seqlens
  DLDevice here;
  std::vector<Slot> slots;
  std::vector<DLTensor> seen;
  std::vector<Launch> launches;
  std::vector<int64_t> written, results;
  std::vector<py::object> options;
  int64_t initial, final, inputs, bytes = 0;
  bool same, decode, poison, nvidia, ffi = false, cuda = false;
  double number;
  at::Device device;
  c10::Allocator* allocator;  // torch's for the device, and keys of its tensors
  c10::DispatchKeySet keys;
  py::object rows, look, kept;  // kept: what holds kernels
  at::Tensor last_rows;
  void* rows_stream = nullptr;
  DLPackExchangeAPI* torch;
  Ffi tvm;
  Driver driver;

  explicit Launcher(const py::dict& d)
      : written(d["written"].cast<std::vector<int64_t>>()), results(d["results"].cast<std::vector<int64_t>>()),
        options(d["options"].cast<std::vector<py::object>>()), initial(d["initial"].cast<int64_t>()),
        final(d["final"].cast<int64_t>()), inputs(d["inputs"].cast<int64_t>()), same(d["same"].cast<bool>()),
        decode(d["decode"].cast<bool>()), poison(d["poison"].cast<bool>()), nvidia(d["nvidia"].cast<bool>()),
        number(d["scale"].cast<double>()), device(at::kCPU), rows(d["rows"]), look(d["look"]), kept(d["launches"]),
        torch(static_cast<DLPackExchangeAPI*>(PyCapsule_GetPointer(d["torch"].cast<py::object>().ptr(), "dlpack_exchange_api"))),
        tvm(d["ffi"]), driver(d["driver"].cast<std::string>()) {
    if (!torch) throw py::error_already_set();
    for (py::handle x : d["arguments"]) {
      kinds.push_back(x.is_none() ? std::nullopt : std::optional<Kind>(Unpacked(x)));
      dtypes.push_back(x.is_none() ? DLDataType{} : Seen(x).dtype);
    }
    device = kinds.at(0).value().device;
    here = Seen(d["arguments"].cast<py::list>()[0]).device;
    const at::Tensor byte = at::empty({1}, at::TensorOptions(at::kByte).device(device));
    allocator = byte.storage().unsafeGetStorageImpl()->allocator(), keys = Keys(byte);
    for (py::handle x : d["made"]) {
      made.emplace_back(Unpacked(x));
      dtypes.push_back(Seen(x).dtype);
    }
    dtypes.push_back({kDLInt, 32, 1});
    for (py::handle row : d["slots"]) Take(row.cast<py::tuple>());
    for (py::handle row : d["launches"]) {
      auto r = row.cast<py::tuple>();
      Launch l{r[0].cast<std::string>() == "ffi", Pointer<void*>(r[1]), {0, 1, 1}, {0, 1, 1}, 0, {}};
      std::tie(l.grid[0], l.block[0], l.shared) = r[2].cast<std::tuple<unsigned, unsigned, unsigned>>();
      for (auto& [what, value] : r[3].cast<std::vector<std::pair<std::string, int64_t>>>()) l.given.push_back({what[0], value});
      launches.push_back(std::move(l));
    }
    if (nvidia) Observe();
    for (const Launch& l : launches) (l.ffi ? ffi : cuda) = true;
    d["by_driver"] = std::count_if(launches.begin(), launches.end(), [](const Launch& l) { return !l.ffi; });
    if (cuda && !driver.starts) throw std::runtime_error("no driver of CUDA");
  }

  // From here on the driver starts the kernels that TVM would, where it can: without TVM's checks that takes 1 us less.
  void Observe() {
    const c10::DeviceGuard guard(device);
    for (Launch& l : launches) {
      if (!l.ffi) continue;
      const auto direct = driver.Observed(Count(slots), [&](int which, void* stream) {
        for (size_t i = 0; i < seen.size(); ++i) seen[i].data = ProbeAddress(which, i);
        Values values;
        Fill(values, l, seen.data(), ProbeNumber(which));
        void* before = nullptr;
        if (tvm.set_stream(here.device_type, here.device_id, stream, &before)) return false;
        const bool started = tvm.Run(l, values);
        tvm.set_stream(here.device_type, here.device_id, before, nullptr);
        return started;
      });
      if (direct) l = *direct;
    }
  }

  static const at::Tensor& Unpacked(py::handle x) { return THPVariable_Unpack(x.ptr()); }

  DLTensor Seen(py::handle x) const {
    DLTensor t{};
    if (torch->dltensor_from_py_object_no_sync(x.ptr(), &t)) throw py::error_already_set();
    return t;
  }

  void Take(const py::tuple& row) {
    Slot s{row[0].cast<int64_t>(), 0, {}, {}, {}};
    DLTensor t{};
    if (s.from == kArgument) {
      s.index = row[1].cast<int64_t>();
      s.shape = row[2].cast<std::vector<int64_t>>();
      t.dtype = dtypes.at(s.index);
    } else {
      s.shape = Unpacked(row[1]).sizes().vec();
      t.dtype = Seen(row[1]).dtype;
      if (s.from == kFixed) s.fixed = Unpacked(row[1]);
    }
    s.strides.resize(s.shape.size());
    int64_t size = 1;
    for (size_t i = s.shape.size(); i-- > 0; size *= s.shape[i] ? s.shape[i] : 1) s.strides[i] = size;
    if (s.from == kWorkspace) {
      s.index = bytes;
      bytes += (size * t.dtype.bits / 8 + kWorkspaceAlign - 1) / kWorkspaceAlign * kWorkspaceAlign;
    }
    t.device = here;
    t.ndim = static_cast<int32_t>(s.shape.size());
    t.shape = s.shape.data(), t.strides = s.strides.data();  // of a vector that is moved, its memory stays
    slots.push_back(std::move(s));
    seen.push_back(t);
  }

  template <class T>
  static int64_t Count(const std::vector<T>& x) {
    return static_cast<int64_t>(x.size());
  }

  bool SameOptions(PyObject* x) const {
    if (!PyTuple_Check(x) || PyTuple_GET_SIZE(x) != Count(options)) return false;
    for (size_t i = 0; i < options.size(); ++i)
      if (!SameValue(PyTuple_GET_ITEM(x, i), options[i].ptr())) return false;
    return true;
  }

  // Whether this call is of the kind that the launcher was made for. Then `m` says where its arguments are.
  bool Fits(PyObject* t, PyObject* x, PyObject* scale, PyObject* decoding, Memory& m) const {
    if (!PyTuple_Check(t) || PyTuple_GET_SIZE(t) < Count(kinds) || (decoding == Py_True) != decode || !SameOptions(x)) return false;
    m.number = number;
    if (scale != Py_None) {
      if (!PyFloat_CheckExact(scale) || !(std::fabs(PyFloat_AS_DOUBLE(scale)) <= FLT_MAX)) return false;
      m.number = PyFloat_AS_DOUBLE(scale);
    }
    if (initial >= 0 && (PyTuple_GET_ITEM(t, initial) == PyTuple_GET_ITEM(t, final)) != same) return false;
    // modes that see torch's ops, and transforms
    const auto local = c10::impl::tls_local_dispatch_key_set();
    if (!(local.included_ - c10::default_included_set).empty() || c10::impl::TorchDispatchModeTLS::any_modes_set()) return false;
    const bool differentiates = c10::GradMode::is_enabled();
    m.at.resize(kinds.size());
    for (int64_t i = 0; i < Count(kinds); ++i) {
      PyObject* y = PyTuple_GET_ITEM(t, i);
      if (!kinds[i]) {
        if (y != Py_None) return false;
        continue;
      }
      if (!IsTensor(y)) return false;
      const at::Tensor& z = THPVariable_Unpack(y);
      if (!kinds[i]->Fits(z) || (differentiates && i < inputs && z.requires_grad())) return false;
      m.at[i] = static_cast<char*>(z.data_ptr());
      if (reinterpret_cast<uintptr_t>(m.at[i]) % kAligned || (kinds[i]->reach && !m.at[i])) return false;
    }
    return IsApart(m);
  }

  // Whether what the call writes shares no byte with what else it reads or writes.
  bool IsApart(const Memory& m) const {
    for (int64_t n : written)
      for (int64_t i = 0; i < Count(kinds); ++i)
        if (kinds[i] && i != n && !(n == initial && i == final) && m.at[i] < m.at[n] + kinds[n]->reach &&
            m.at[n] < m.at[i] + kinds[i]->reach)
          return false;
    return true;
  }

  // cu_seqlens of equal rows. Calls on one stream share it; a graph that is being captured gets its own.
  void TakeRows(Memory& m) {
    const bool captures = nvidia ? driver.Captures(m.stream) : device.is_cuda();
    if (!captures && last_rows.defined() && rows_stream == m.stream) {
      m.rows = last_rows;
    } else {
      m.rows = Unpacked(rows());
      if (!captures) last_rows = m.rows, rows_stream = m.stream;
    }
  }

  // What at::empty gives on the current device, without the dispatcher and its guard.
  at::Tensor Empty(at::IntArrayRef shape, at::ScalarType dtype) const {
    return at::detail::empty_generic(shape, allocator, keys, dtype, std::nullopt);
  }

  void Allocate(Memory& m) const {
    for (const Kind& like : made) {
      m.made.push_back(Empty(like.shape, like.dtype));
      at::Tensor& x = m.made.back();
      if (poison) x.fill_(x.is_floating_point() ? std::numeric_limits<double>::quiet_NaN() : -1.0);
      m.at.push_back(static_cast<char*>(m.made.back().data_ptr()));
    }
    m.at.push_back(m.rows.defined() ? static_cast<char*>(m.rows.data_ptr()) : nullptr);
    if (bytes) m.held = Empty({bytes}, at::kByte);
  }

  char* Address(const Slot& s, const Memory& m) const {
    return s.from == kArgument ? m.at[s.index] : s.from == kFixed ? static_cast<char*>(s.fixed.data_ptr())
                                                                  : static_cast<char*>(m.held.data_ptr()) + s.index;
  }

  // Starts the kernels. How many started.
  size_t Start(const Memory& m) const {
    c10::SmallVector<DLTensor, 24> tensors(seen.begin(), seen.end());
    for (size_t i = 0; i < slots.size(); ++i) tensors[i].data = Address(slots[i], m);
    Values values;
    c10::SmallVector<void*, 40> places;
    void* before = nullptr;
    const bool streams = ffi && device.is_cuda();
    if (streams && tvm.set_stream(here.device_type, here.device_id, m.stream, &before)) return 0;
    size_t n = 0;
    for (; n < launches.size(); ++n) {
      const Launch& l = launches[n];
      Fill(values, l, tensors.data(), m.number);
      if (l.ffi) {
        if (!tvm.Run(l, values)) break;
        continue;
      }
      places.clear();
      for (FfiAny& v : values) places.push_back(&v.p);
      if (driver.launch(l.kernel, l.grid[0], l.grid[1], l.grid[2], l.block[0], l.block[1], l.block[2], l.shared, m.stream,
                        places.data(), nullptr))
        break;
    }
    if (streams && before != m.stream) tvm.set_stream(here.device_type, here.device_id, before, nullptr);
    return n;
  }

  // As torch's own ops do, so that a gradient that needs the old values says so.
  static void Touch(const at::Tensor& x) {
    if (!x.is_inference()) x.unsafeGetTensorImpl()->bump_version();
  }

  // The results, or None on arguments of another kind, and where no kernel started: the way through Python says what is wrong.
  PyObject* operator()(PyObject* t, PyObject* x, PyObject* scale, PyObject* decoding) {
    Memory m;
    if (!Fits(t, x, scale, decoding, m)) Py_RETURN_NONE;
    for (Py_ssize_t i = Count(kinds); i < PyTuple_GET_SIZE(t); ++i)
      if (PyTuple_GET_ITEM(t, i) != Py_None) {
        look(py::handle(t));
        break;
      }
    void* current = nullptr;
    if (device.is_cuda()) {
      if (c10::impl::VirtualGuardImpl(device.type()).getDevice() != device) Py_RETURN_NONE;
      if (torch->current_work_stream(here.device_type, here.device_id, &m.stream)) throw py::error_already_set();
    }
    if (cuda && (driver.context(&current) || !current)) Py_RETURN_NONE;
    if (!rows.is_none()) TakeRows(m);
    size_t started = 0;
    std::string said;
    {
      py::gil_scoped_release other_threads_run;
      try {
        Allocate(m);
        started = Start(m);
      } catch (const std::exception& e) {  // no memory
        said = e.what();
      }
    }
    if (PyErr_Occurred()) return nullptr;
    if (started < launches.size()) {
      if (!started) Py_RETURN_NONE;
      throw std::runtime_error("kernel " + std::to_string(started) + " of the call did not start " + said);
    }
    for (int64_t n : written) Touch(THPVariable_Unpack(PyTuple_GET_ITEM(t, n)));
    PyObject* all = PyTuple_New(Count(results));
    for (int64_t i = 0; all && i < Count(results); ++i) {
      const int64_t n = results[i];
      PyObject* y = n < 0 ? Py_NewRef(Py_None) : n < Count(kinds) ? Py_NewRef(PyTuple_GET_ITEM(t, n))
                                                                  : THPVariable_Wrap(m.made[n - Count(kinds)]);
      PyTuple_SET_ITEM(all, i, y);
    }
    return all;
  }
};

PyObject* Call(PyObject* self, PyObject* const* args, Py_ssize_t n) {
  try {
    if (n != 4) Py_RETURN_NONE;
    return (*static_cast<Launcher*>(PyCapsule_GetPointer(self, kName)))(args[0], args[1], args[2], args[3]);
  } catch (py::error_already_set& e) {
    e.restore();
  } catch (const std::exception& e) {
    PyErr_SetString(PyExc_RuntimeError, e.what());
  }
  return nullptr;
}

PyMethodDef kCall{"again", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(Call)), METH_FASTCALL,
                  "(tensors, options, scale, decode) -> the results of the call, or None"};

py::object Make(const py::dict& about) {
  py::capsule self(new Launcher(about), kName, [](PyObject* c) { delete static_cast<Launcher*>(PyCapsule_GetPointer(c, kName)); });
  return py::reinterpret_steal<py::object>(PyCFunction_New(&kCall, self.ptr()));
}
}  // namespace

PYBIND11_MODULE(native_launcher, m) {
  m.def("make", &Make);
  m.def("keywords", &MakeKeywords);
}
