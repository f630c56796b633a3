/*
 * Starts the commands of a sandbox. runner.sh, which is PID 1, runs this program and falls back to shells without it.
 *
 *   runner CONTROL          Serves commands. Standard input names the workers to start, one number a line. End-of-file
 *                           means that the owner is gone. Standard output: "ready program", then for worker K "K up",
 *                           "K STATUS" after each command, and "K dead" if no process could be started for it.
 *   runner CONTROL FILE     Becomes the command of the record in FILE. For records too long for one read of a FIFO.
 *
 * Worker K is a process that waits for a record on the FIFO wK and then becomes the command. It exists before its
 * command arrives. Until then it shares this program's memory, so no page is copied. The process "main" waits for all
 * workers, reports their status and starts the next ones. The process "reader" reads standard input. Both end by a
 * signal or with status 1. To runner.sh, any other status means that this program does not run here.
 *
 * A record is a list of words, each ended by a zero byte: the paths of standard input, output and error, PWD=DIRECTORY,
 * further NAME=VALUE variables, an empty word, and the command. Records come from the host. This program reads no other
 * data.
 *
 * It does without a C library, whose start alone would cost as much as the rest. Built by hatch_build.py.
 */

void begin(long *stack);

enum { LONGEST = 4096, STACK = 16384, PATH = 4096 };
enum { RDONLY = 0, WRONLY = 1, CLOEXEC = 02000000, AT_FDCWD = -100 };
enum { ENOENT = 2, EINTR = 4, ENOEXEC = 8, EACCES = 13, ENOTDIR = 20, SIGKILL = 9, SIGCHLD = 17 };
enum { CLONE_VM = 0x100, CLONE_PARENT = 0x8000, CLONE_PARENT_SETTID = 0x100000 };
enum { PROT_READ_WRITE = 3, MAP_PRIVATE = 2, MAP_ANONYMOUS = 32, SEEK_SET = 0, SEEK_END = 2 };

struct worker {
  struct worker *next;
  int pid, number; /* number is -1 if the worker can be reused */
  long size;
  char record[LONGEST + 1];
  char stack[STACK] __attribute__((aligned(16)));
  char *words[]; /* room for the largest environment and command */
};

static char *control, **environment;
static long variables;
static struct worker *workers;
static int reader_pid;

#include "runner.h"

static void quit(int status) {
  for (;;) call(EXIT, status, 0, 0, 0, 0);
}

static long open_file(const char *path, int flags) { return call(OPENAT, AT_FDCWD, (long)path, flags, 0, 0); }

static char *map(long size, long file) {
  long at = call(MMAP, 0, size, PROT_READ_WRITE, MAP_PRIVATE | (file < 0 ? MAP_ANONYMOUS : 0), file);
  return at < 0 && at > -4096 ? 0 : (char *)at;
}

/* --- text --------------------------------------------------------------------------------------------------------- */

static long length(const char *text) {
  long count = 0;
  while (text[count]) count++;
  return count;
}

/* Copies text to *at and moves *at to its end. */
static void add(char **at, const char *text) {
  while (*text) *(*at)++ = *text++;
  **at = 0;
}

static void add_number(char **at, int number) {
  char digits[12], *digit = digits + sizeof digits - 1;
  *digit = 0;
  do *--digit = (char)('0' + number % 10);
  while (number /= 10);
  add(at, digit);
}

static void complain(const char *name, const char *what) {
  call(WRITE, 2, (long)name, length(name), 0, 0);
  call(WRITE, 2, (long)what, length(what), 0, 0);
}

static int same_name(const char *one, const char *other) {
  while (*one && *one != '=' && *one == *other) one++, other++;
  return *one == '=' && *other == '=';
}

/* --- a command ---------------------------------------------------------------------------------------------------- */

/* Becomes the program, or returns the error. A file of unknown format runs as a script of /bin/sh, which needs
   command[-1] to be free. */
static long become(char *path, char **command, char **variables_of_it) {
  long error = -call(EXECVE, (long)path, (long)command, (long)variables_of_it, 0, 0);
  if (error == ENOEXEC) {
    command[-1] = "/bin/sh";
    command[0] = path;
    error = -call(EXECVE, (long)"/bin/sh", (long)(command - 1), (long)variables_of_it, 0, 0);
  }
  return error;
}

/* Finds the command on PATH as a shell does and becomes it. Returns the exit status if that fails. */
static int run(char **command, char **variables_of_it) {
  static const char *const usual = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";
  char path[PATH], *name = command[0];
  const char *places = usual;
  long error = ENOENT, denied = 0, size = length(name), slashes = 0;
  for (long at = 0; at < size; at++) slashes += name[at] == '/';
  for (char **one = variables_of_it; *one; one++)
    if (same_name(*one, usual)) places = *one;
  places += 5;
  if (slashes) error = become(name, command, variables_of_it);
  if (error == ENOTDIR) error = ENOENT; /* as in dash; bash reports 126 */
  while (size && !slashes && places) {
    const char *end = places;
    while (*end && *end != ':') end++;
    if (end - places + size + 2 <= PATH) {
      char *at = path;
      while (places < end) *at++ = *places++;
      if (at > path) *at++ = '/';
      add(&at, name);
      error = become(path, command, variables_of_it);
      if (error == EACCES) denied = 1;
      else if (error != ENOENT && error != ENOTDIR) break;
      error = denied ? EACCES : ENOENT;
    }
    places = *end ? end + 1 : 0;
  }
  complain(name, error == ENOENT ? ": not found\n" : error == EACCES ? ": Permission denied\n" : ": cannot be run\n");
  return error == ENOENT ? 127 : 126;
}

static void stream(int number, const char *path, int flags) {
  call(CLOSE, number, 0, 0, 0, 0);
  if (open_file(path, flags) != number) quit(2);
}

/* Carries out a record. Never returns. words: room for the environment and the command. */
static void carry_out(char *record, char *end, char **words) {
  char *fields[4], *at = record, **word = words;
  for (int number = 0; number < 4; number++) {
    if (at >= end) quit(2);
    fields[number] = at;
    at += length(at) + 1;
  }
  char *directory = fields[3] + 4; /* skips PWD=, which is set for the command only if it is set here */
  for (char **one = environment; *one; one++) *word++ = same_name(*one, fields[3]) ? fields[3] : *one;
  char **ours = word;
  for (; at < end && *at; at += length(at) + 1) {
    char **one = words;
    while (one < ours && !same_name(*one, at)) one++;
    *(one < ours ? one : word++) = at;
  }
  *word++ = 0;
  char **command = ++word; /* leaves one entry free, for become() */
  for (at++; at < end; at += length(at) + 1) *word++ = at;
  *word = 0;
  stream(0, fields[0], RDONLY);
  stream(1, fields[1], WRONLY);
  stream(2, fields[2], WRONLY);
  if (call(CHDIR, (long)directory, 0, 0, 0, 0)) {
    complain("cannot change to the directory ", directory);
    complain("", "\n");
    quit(126);
  }
  quit(run(command, words));
}

/* Carries out the record in a file, in private memory. Never returns. */
static void carry_out_file(const char *path) {
  long file = open_file(path, RDONLY | CLOEXEC), size = call(LSEEK, file, 0, SEEK_END, 0, 0);
  char *record = size > 0 ? map(size, file) : 0;
  char *words = record && !record[size - 1] ? map((size + variables + 4) * (long)sizeof(char *), -1) : 0;
  if (words) carry_out(record, record + size, (char **)words);
  quit(2);
}

/* --- main, reader, workers ---------------------------------------------------------------------------------------- */

static void work(void *given) {
  struct worker *self = given;
  char path[PATH], *at = path;
  call(SETSID, 0, 0, 0, 0, 0);
  add(&at, control);
  add(&at, "/w");
  add_number(&at, self->number);
  long size = self->size = call(READ, open_file(path, RDONLY | CLOEXEC), (long)self->record, LONGEST, 0, 0);
  if (size <= 0) quit(2);
  self->record[size] = 0;
  char *end = self->record + size;
  if (length(self->record) + 1 < size) carry_out(self->record, end, self->words);
  char *again[] = {path, control, self->record, 0};
  at = path;
  add(&at, control);
  add(&at, "/runner");
  call(EXECVE, (long)path, (long)again, (long)environment, 0, 0);
  quit(2);
}

static void say(int number, const char *what, int status) {
  char line[64], *at = line;
  add_number(&at, number);
  add(&at, what);
  if (status >= 0) add_number(&at, status);
  add(&at, "\n");
  call(WRITE, 1, (long)line, at - line, 0, 0);
}

static void employ(struct worker *one, long flags) {
  if (start(CLONE_VM | CLONE_PARENT_SETTID | SIGCHLD | flags, one->stack + STACK, &one->pid, work, one) < 0) {
    int number = one->number;
    one->pid = 0;
    one->number = -1;
    say(number, " dead", -1);
  }
}

static void hire(int number) {
  struct worker *one = workers;
  while (one && one->number >= 0) one = one->next;
  if (!one) {
    one = (struct worker *)map((long)sizeof *one + (LONGEST + variables + 4) * (long)sizeof(char *), -1);
    if (!one) {
      say(number, " dead", -1);
      return;
    }
    one->next = workers;
    workers = one;
  }
  one->number = number;
  say(number, " up", -1);
  employ(one, CLONE_PARENT); /* makes main its parent, as for later workers */
}

static void read_numbers(void *unused) {
  char text[256];
  long size;
  int number = 0;
  (void)unused;
  while ((size = call(READ, 0, (long)text, sizeof text, 0, 0)) > 0 || size == -EINTR)
    for (long at = 0; at < size; at++) {
      if (text[at] != '\n') {
        number = number * 10 + text[at] - '0';
      } else {
        hire(number);
        number = 0;
      }
    }
  call(KILL, -1, SIGKILL, 0, 0, 0);
  quit(1);
}

void begin(long *stack) {
  static char reader_stack[STACK] __attribute__((aligned(16)));
  char **words = (char **)(stack + 1);
  if (stack[0] < 2) quit(0);
  control = words[1];
  environment = words + stack[0] + 1;
  while (environment[variables]) variables++;
  if (stack[0] > 2) carry_out_file(words[2]);
  if (start(CLONE_VM | CLONE_PARENT_SETTID | SIGCHLD, reader_stack + STACK, &reader_pid, read_numbers, 0) < 0) quit(2);
  static const char ready[] = "ready program\n";
  call(WRITE, 1, (long)ready, sizeof ready - 1, 0, 0);
  for (;;) {
    int status = 0;
    long pid = call(WAIT4, -1, (long)&status, 0, 0, 0);
    struct worker *one = workers;
    if (pid == -EINTR) continue;
    if (pid < 0 || pid == reader_pid) break;
    while (one && one->pid != pid) one = one->next;
    if (!one) continue;
    while (one->size > 0) one->record[--one->size] = 0; /* hides its variables from later commands */
    say(one->number, " ", status & 127 ? 128 + (status & 127) : status >> 8 & 255);
    employ(one, 0);
  }
  call(KILL, -1, SIGKILL, 0, 0, 0);
  call(KILL, call(GETPID, 0, 0, 0, 0, 0), SIGKILL, 0, 0, 0);
  quit(1);
}
