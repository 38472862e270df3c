#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
#
# Checks the layers of the source tree: which folder may include which. Also checks that every include is written from
# the root, that the top level has nothing new, and that the public headers compile alone, in C and in C++.
#
#       layers.sh ROOT        one line per violation on stdout; exit status 1 if there are any
#
# Compilers are $CC and $CXX (default cc and c++; without a C++ compiler that part is skipped, and says so).
set -u

# folder        folders that it may include besides itself ("*": all)
LAYERS='
ipc/base
kernels         ipc/base
ipc             ipc/base
store           ipc/base kernels store/cache store/below store/sequence store/methods store/device store/file store/remote store/check
store/cache     ipc/base store
store/sequence  ipc/base store store/cache store/below
store/methods   ipc/base kernels store store/cache store/below store/sequence store/file
store/device    ipc/base store store/cache
store/below     ipc/base store store/cache
store/file      ipc/base store store/cache store/below store/sequence
store/remote    ipc/base store store/cache store/below store/file
store/check     ipc/base store store/cache store/below store/sequence store/methods store/device store/file store/remote
client          ipc/base ipc kernels client/conn client/cache client/gpu client/methods
client/conn     ipc/base ipc client client/gpu
client/cache    ipc/base ipc kernels client client/conn client/gpu
client/gpu      ipc/base ipc client client/conn
client/methods  ipc/base ipc kernels client client/conn client/gpu
daemon/base     ipc/base ipc store
daemon/process  ipc/base ipc daemon/base
daemon/process/disk      ipc/base ipc store/file daemon/base daemon/process
daemon/process/exporter  ipc/base ipc daemon/base daemon/process
daemon/process/keeper    ipc/base ipc daemon/base daemon/process
daemon/process/remote    ipc/base ipc daemon/base daemon/process
daemon/process/worker    ipc/base ipc kernels daemon/base daemon/process
daemon/children ipc/base ipc store daemon/base daemon/process/remote
daemon/handlers ipc/base ipc store daemon/base daemon/children daemon/serve
daemon/serve    ipc/base ipc store daemon/base daemon/children daemon/handlers
daemon/main     ipc/base ipc store daemon/base daemon/children daemon/serve daemon/process/disk daemon/process/exporter daemon/process/keeper daemon/process/remote daemon/process/worker
tools           ipc/base ipc client client/conn kernels
tests           *
'

# The public headers: any layer but ipc/base may include them. They include only libc and each other, by names that are
# right both in this folder and where they are installed.
PUBLIC='client/kvd.h client/kvd_methods.h client/kvd_cuda.h client/kvd_attend.h'
LIBC='stddef.h stdint.h kvd.h'

# System headers that would break a layer's promise: the store has no sockets and no messages.
FORBIDDEN='
store           sys/socket.h sys/un.h sys/epoll.h poll.h liburing.h msgpack.h
kernels         sys/socket.h sys/un.h msgpack.h
'

TOP='meson.build meson_options.txt daemon client ipc kernels store tests tools systemd README.md CHANGELOG.md CONTRIBUTING.md GUARANTEES.md SECURITY.md LICENSE' # and dotfiles

root=${1:?usage: layers.sh ROOT}
cd "$root" || exit 2
status=$(mktemp) || exit 2
trap 'rm -f "$status"' EXIT

violation() {
        echo "$*"
        echo 1 >"$status"
}

# Files that belong to the tree: those that git would commit, or all files without git.
files() {
        if git rev-parse --git-dir >/dev/null 2>&1; then
                git ls-files --cached --others --exclude-standard
        else
                find . -type f | sed 's|^\./||'
        fi | sort -u
}

sources() {
        files | grep -E '\.(c|h|def|cu|cuh|cc|cpp)$' | while read -r file; do
                [ -f "$file" ] && echo "$file"
        done
}

check_includes() {
        sources | tr '\n' '\0' | xargs -0 awk -v layers="$LAYERS" -v forbidden="$FORBIDDEN" -v public="$PUBLIC" '
        function layer_of(path,   best, name) {
                best = ""
                for (name in allowed)
                        if (index(path, name "/") == 1 && length(name) > length(best))
                                best = name
                return best
        }
        # in a folder or in one above it
        function is_forbidden(from, what,   name) {
                for (name in never)
                        if (index(from "/", name "/") == 1 && index(never[name], " " what " "))
                                return 1
                return 0
        }
        function exists(path,   line, r) {
                if (!(path in known)) {
                        r = (getline line < path)
                        close(path)
                        known[path] = r >= 0
                }
                return known[path]
        }
        function bad(text) { printf "%s:%d: %s\n", FILENAME, FNR, text }
        BEGIN {
                n = split(layers, row, "\n")
                for (i = 1; i <= n; i++)
                        if (split(row[i], word, /[ \t]+/) >= 1 && word[1] != "")
                                allowed[word[1]] = " " substr(row[i], length(word[1]) + 1) " " word[1] " "
                n = split(forbidden, row, "\n")
                for (i = 1; i <= n; i++)
                        if (split(row[i], word, /[ \t]+/) >= 1 && word[1] != "")
                                never[word[1]] = " " substr(row[i], length(word[1]) + 1) " "
        }
        match($0, /^[ \t]*#[ \t]*include[ \t]*[<"][^>"]*[>"]/) {
                what = substr($0, RSTART, RLENGTH)
                quoted = what ~ /"$/
                gsub(/^[^<"]*[<"]|[>"]$/, "", what)
                from = layer_of(FILENAME)
                if (what == "kvd.h" && index(" " public " ", " " FILENAME " "))
                        next
                if (!quoted) {
                        if (is_forbidden(from, what))
                                bad(from " must not include <" what ">")
                        next
                }
                to = layer_of(what)
                if (what ~ /(^|\/)\.\.?\//)
                        bad("\"" what "\" is not written from the root")
                else if (to == "" || !exists(what))
                        bad("\"" what "\" is no file, seen from the root")
                else if ((from == "ipc/base" || !index(" " public " ", " " what " ")) && from != "" && !index(allowed[from], " * ") && !index(allowed[from], " " to " "))
                        bad(from " must not include \"" what "\" (" to ")")
        }'
}

check_public_includes() {
        for header in $PUBLIC; do
                sed -n 's/^[ \t]*#[ \t]*include[ \t]*//p' "$header" | while read -r what rest; do
                        name=$(echo "$what" | tr -d '<>"')
                        case " $LIBC " in
                        *" $name "*) ;;
                        *) violation "$header: includes $what, which is not one of: $LIBC" ;;
                        esac
                done
        done
}

check_top() {
        files | sed 's|/.*||' | grep -v '^\.' | sort -u | while read -r entry; do
                case " $TOP " in
                *" $entry "*) ;;
                *) [ -e "$entry" ] && violation "$entry: not a top-level entry of this project" ;;
                esac
        done
}

# compile LANGUAGE COMMAND...: compiles a public header as its users do, with all warnings as errors
compile() {
        language=$1
        shift
        for header in $PUBLIC; do
                text=$(printf '#include "%s"\nint main(void) { return KVD_NAME_MAX == 0; }\n' "$header" |
                        "$@" -x "$language" -I. -Wall -Wextra -Wpedantic -Werror -fsyntax-only - 2>&1) ||
                        violation "$header: does not compile alone as $language: $text"
        done
}

check_public_compiles() {
        # shellcheck disable=SC2086 # CC may hold flags
        compile c ${CC:-cc} -std=c99
        if command -v ${CXX:-c++} >/dev/null 2>&1; then
                compile c++ ${CXX:-c++} -std=c++11
        else
                echo "no C++ compiler: $PUBLIC was not tried as C++" >&2
        fi
}

check_includes | while read -r line; do
        violation "$line"
done
check_public_includes
check_top
check_public_compiles
[ ! -s "$status" ]
