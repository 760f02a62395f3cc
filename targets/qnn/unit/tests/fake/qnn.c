/* A library with the interfaces of QNN 2.51 that moec's unit calls, for tests: as libQnnHtp.so (with HTP defined) and as
 * libQnnSystem.so (with SYSTEM). It is written from the same public material as moec's declarations, and apart from them, so that one
 * is held against the other.
 *
 * Its contexts are text: "moec-fake-context CHIP", a line "NAME ROWS INPUTS OUTPUTS" for each graph, "end". Stored numbers have 16 bits; a
 * result is 65535 less what stands at its place in the input, again from the first one where the input is shorter. Graphs called
 * "unloadable" or "failing" are refused where they are loaded or executed. Calls are appended to LOG.
 */
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef uint64_t Status;
typedef struct { uint32_t major, minor, patch; } Version;
typedef struct { float scale; int32_t offset; } ScaleOffset;
typedef struct { uint32_t definition, encoding; union { ScaleOffset scale_offset; uint64_t words[4]; } of; } Quantize;
typedef struct { void *data; uint32_t len; } ClientBuffer;
typedef struct {
  uint32_t id;
  const char *name;
  uint32_t kind, format, dtype;
  Quantize quantize;
  uint32_t rank;
  const uint32_t *dims;
  uint32_t memory;
  ClientBuffer buffer;
} TensorV1;
/* As long as its second version, which begins like the first. */
typedef struct {
  uint32_t version;
  TensorV1 v1;
  const uint8_t *dynamic;
  uint32_t sparse[3];
  uint8_t produced;
} Tensor;
_Static_assert(sizeof(Quantize) == 40 && sizeof(ClientBuffer) == 16 && sizeof(Tensor) == 144, "Qnn_Tensor_t");
_Static_assert(sizeof(TensorV1) == 112 && offsetof(TensorV1, buffer) == 96, "Qnn_TensorV1_t");

#ifndef BUILD
#define BUILD "v2.51.0.fake"
#endif
#ifndef CORE
#define CORE 2
#endif
enum { U16 = 0x0416, MOST = 64, NOT_FOUND = 6001, FAILED = 1100 };

typedef struct { char name[64]; uint32_t dims[2][2]; Tensor ports[2]; } Graph;
typedef struct { uint32_t chip, count; Graph graphs[MOST]; } Context;

static void note(const char *what, const char *which) {
  FILE *to = fopen(LOG, "a");
  if (to) { fprintf(to, "%s %s\n", what, which); fclose(to); }
}

/* Reads a context; null if it is none. */
static Context *parse(const void *bytes, uint64_t len) {
  char *text = calloc(1, len + 1), *rest = text, *line;
  Context *context = calloc(1, sizeof *context);
  int whole = 0;
  memcpy(text, bytes, len);
  while ((line = strsep(&rest, "\n"))) {
    Graph *graph = &context->graphs[context->count];
    uint32_t rows, in, out;
    if (context->chip == 0) {
      if (sscanf(line, "moec-fake-context %u", &context->chip) != 1) break;
    } else if (strcmp(line, "end") == 0) {
      whole = 1;
    } else if (context->count < MOST && sscanf(line, "%63s %u %u %u", graph->name, &rows, &in, &out) == 4) {
      const uint32_t widths[2] = {in, out};
      for (int i = 0; i < 2; i++) {
        graph->ports[i].version = 1;
        TensorV1 *port = &graph->ports[i].v1;
        graph->dims[i][0] = rows;
        graph->dims[i][1] = widths[i];
        port->id = 10 * context->count + i;
        port->name = i ? "y" : "x";
        port->kind = i;
        port->dtype = U16;
        port->quantize.definition = 1;
        port->quantize.of.scale_offset = (ScaleOffset){1.0f / 1024, -32768};
        port->rank = 2;
        port->dims = graph->dims[i];
      }
      context->count++;
    }
  }
  free(text);
  if (whole) return context;
  free(context);
  return NULL;
}

#ifdef HTP
typedef void (*LogFn)(const char *, uint32_t, uint64_t, va_list);
static LogFn logger;

static void say(const char *format, ...) {
  va_list arguments;
  va_start(arguments, format);
  if (logger) logger(format, 1, 0, arguments);
  va_end(arguments);
}

static Status log_create(LogFn to, uint32_t level, void **log) { (void)level; logger = to; *log = &logger; return 0; }
static Status build_id(const char **id) { *id = BUILD; return 0; }
static Status backend_create(void *log, const void **configs, void **backend) {
  (void)log, (void)configs;
  *backend = &logger;
  return 0;
}
static Status device_create(void *log, const void **configs, void **device) {
  (void)log;
  /* Configuration, its value, and there the number of the chip. */
  const struct { uint32_t option; const uint32_t *custom; } *config = configs[0];
  char chip[16];
  snprintf(chip, sizeof chip, "%u", config->custom[2]);
  note("device", chip);
  *device = &logger;
  return 0;
}
static Status from_binary(void *backend, void *device, const void **configs, const void *bytes, uint64_t len, void **to, void *profile) {
  (void)backend, (void)device, (void)configs, (void)profile;
  Context *context = parse(bytes, len);
  if (!context) return FAILED;
  for (uint32_t i = 0; i < context->count; i++) {
    if (strcmp(context->graphs[i].name, "unloadable") == 0) {
      say("no room for %s", "unloadable");
      return FAILED;
    }
  }
  note("load", context->graphs[0].name);
  *to = context;
  return 0;
}
static Status context_free(void *context, void *profile) {
  (void)profile;
  note("free", ((Context *)context)->graphs[0].name);
  free(context);
  return 0;
}
static Status retrieve(void *of, const char *name, void **graph) {
  Context *context = of;
  for (uint32_t i = 0; i < context->count; i++) {
    if (strcmp(context->graphs[i].name, name) == 0) {
      note("retrieve", name);
      *graph = &context->graphs[i];
      return 0;
    }
  }
  return NOT_FOUND;
}
static Status execute(void *of, const Tensor *in, uint32_t ins, Tensor *out, uint32_t outs, void *profile, void *signal) {
  (void)profile, (void)signal;
  Graph *graph = of;
  note("execute", graph->name);
  if (strcmp(graph->name, "failing") == 0) {
    say("tensor unit %d has stopped", 3);
    return FAILED;
  }
  if (ins != 1 || outs != 1 || in->v1.id != graph->ports[0].v1.id || out->v1.id != graph->ports[1].v1.id) return NOT_FOUND;
  const uint16_t *from = in->v1.buffer.data;
  uint16_t *to = out->v1.buffer.data;
  const uint32_t have = in->v1.buffer.len / 2, want = out->v1.buffer.len / 2;
  if (have != graph->dims[0][0] * graph->dims[0][1] || want != graph->dims[1][0] * graph->dims[1][1]) return FAILED;
  for (uint32_t i = 0; i < want; i++) to[i] = 65535 - from[i % have];
  return 0;
}
static Status release(void *handle) { (void)handle; return 0; }
static Status error_message(Status code, const char **message) {
  *message = code == FAILED ? "it has failed" : "it is not there";
  return 0;
}

typedef void (*Function)(void);
static struct { uint32_t backend; const char *name; Version core, version; Function table[75]; } provider;
_Static_assert(sizeof provider == 640 && offsetof(__typeof__(provider), table) == 40, "QnnInterface_t");
static const void *providers[] = {&provider};

Status
#ifdef NO_SYMBOL
QnnInterface_somethingElse
#else
QnnInterface_getProviders
#endif
(const void ***list, uint32_t *count) {
  provider.core.major = CORE;
  provider.table[1] = (Function)backend_create;
  provider.table[4] = (Function)build_id;
  provider.table[8] = (Function)release;
  provider.table[13] = (Function)from_binary;
  provider.table[14] = (Function)context_free;
  provider.table[20] = (Function)retrieve;
  provider.table[21] = (Function)execute;
  provider.table[25] = (Function)log_create;
  provider.table[27] = (Function)release;
  provider.table[40] = (Function)device_create;
  provider.table[43] = (Function)release;
  provider.table[48] = (Function)error_message;
  *list = providers;
  *count = 1;
  return 0;
}
#endif

#ifdef SYSTEM
typedef struct {
  uint32_t version;
  const char *name;
  uint32_t ins;
  const Tensor *inputs;
  uint32_t outs;
  const Tensor *outputs;
  uint32_t more;
  const Tensor *updateable;
  uint32_t blob_len;
  const void *blob;
  uint32_t first, last;
} GraphInfo;
/* The third version of the description. */
typedef struct {
  uint32_t backend;
  const char *build;
  Version core, api;
  const char *soc;
  Version blob_version;
  uint64_t blob_len;
  uint32_t tensor_count;
  const Tensor *tensors;
  uint32_t graph_count;
  const GraphInfo *graphs;
  const void *platform;
  uint32_t metadata_len;
  const void *metadata;
  uint32_t soc_model;
} BinaryInfoV3;
typedef struct { uint32_t version; BinaryInfoV3 v3; } BinaryInfo;
_Static_assert(sizeof(GraphInfo) == 88 && sizeof(BinaryInfo) == 144, "QnnSystemContext_BinaryInfo_t");

typedef struct { Context *context; GraphInfo graphs[MOST]; BinaryInfo info; } Reader;

static Status context_create(void **reader) { *reader = calloc(1, sizeof(Reader)); return 0; }
static Status context_free(void *reader) { free(((Reader *)reader)->context); free(reader); return 0; }
static Status binary_info(void *of, void *bytes, uint64_t len, const BinaryInfo **info, uint64_t *size) {
  Reader *reader = of;
  Context *context = reader->context = parse(bytes, len);
  if (!context) return FAILED;
  for (uint32_t i = 0; i < context->count; i++) {
    Graph *graph = &context->graphs[i];
    reader->graphs[i] = (GraphInfo){.version = 1, .name = graph->name, .ins = 1, .inputs = &graph->ports[0], .outs = 1, .outputs = &graph->ports[1]};
  }
  reader->info = (BinaryInfo){3, {.build = BUILD, .graph_count = context->count, .graphs = reader->graphs, .soc_model = context->chip}};
  *info = &reader->info;
  *size = sizeof reader->info;
  return 0;
}

typedef void (*Function)(void);
static struct { uint32_t backend; const char *name; Version version; Function table[13]; } provider;
_Static_assert(sizeof provider == 136 && offsetof(__typeof__(provider), table) == 32, "QnnSystemInterface_t");
static const void *providers[] = {&provider};

Status QnnSystemInterface_getProviders(const void ***list, uint32_t *count) {
  provider.version = (Version){1, 15, 0};
  provider.table[0] = (Function)context_create;
  provider.table[1] = (Function)binary_info;
  provider.table[3] = (Function)context_free;
  *list = providers;
  *count = 1;
  return 0;
}
#endif
